"""Quantises float networks to INT8 with NNCF."""
