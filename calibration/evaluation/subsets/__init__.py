"""Compares ensembles by accuracy and cost: every subset of the members, averaged and pooled."""
