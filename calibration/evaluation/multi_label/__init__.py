"""Evaluates multi-label sets: independent scores of classes, against sets of labels."""
