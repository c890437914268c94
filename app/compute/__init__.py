"""The cores and threads of a process, the liveness of its stages, and child processes."""
