"""Which ensemble is worth its cost: every subset of the members, averaged and pooled."""
