"""Cores and threads of one process: how many, which, and whether the network on them works."""
