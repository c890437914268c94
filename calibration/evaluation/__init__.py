"""Measures the accuracy of a model set, with confidence intervals."""
