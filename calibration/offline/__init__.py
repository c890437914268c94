"""Classifies images in this process, with the answers that a service would give."""
