"""Samples of live images with their answers, and feedback: the right labels, from callers."""
