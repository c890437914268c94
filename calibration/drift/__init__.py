"""Compares two sets of answers, to show whether the photos that a service sees have changed."""
