"""Evaluates multi-label sets: scores of each class by itself, against sets of labels."""
