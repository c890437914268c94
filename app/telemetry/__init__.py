"""Metrics and spans of a replica, and their export."""
