"""Serve's HAProxy: edits of its configuration, and the command that starts it."""
