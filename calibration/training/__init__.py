"""Trains the bundled set's float networks, with torch."""
