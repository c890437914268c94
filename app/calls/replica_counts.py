"""How many replicas each deployment has, as this process's routers are told by Serve."""

_counts: dict[tuple[str, str], int] = {}


def note_replicas(app_name: str, deployment_name: str, count: int) -> None:
    """Note what a router was told; it may run on another thread than who asks."""
    _counts[app_name, deployment_name] = count


def num_replicas(app_name: str, deployment_name: str) -> int:
    """Return what was noted last; 1 before anything was."""
    return _counts.get((app_name, deployment_name), 1)
