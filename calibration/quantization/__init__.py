"""Float networks to INT8 with NNCF."""
