"""Which ensemble is worth its cost: every subset of the members, weighted in several ways."""
