"""The cores and threads of a process, and the liveness of its stages."""
