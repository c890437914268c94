"""Accuracy of a model set: measured, with intervals, and kept in the manifest."""
