"""Learns sets for the user's own classes from few photographs, on the features of another set."""
