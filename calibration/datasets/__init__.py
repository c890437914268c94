"""Reads images from disk, with and without labels."""
