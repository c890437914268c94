"""Cores and threads of a process, whether the network on them works, and child processes."""
