"""Which replicas each deployment has, as this process's routers and its channels know them.

Serve tells a router, which runs on a thread of its own; calls are made on another one. Every value
is replaced as a whole, so that none needs a lock.
"""

from typing import NamedTuple


class KnownReplicas(NamedTuple):
    """The replicas of a deployment."""

    num: int
    near: tuple[str, ...] = ()  # the unique ids of those on this process's node


_known: dict[tuple[str, str], KnownReplicas] = {}
_BEFORE_ANY = KnownReplicas(1)
_silent: set[str] = set()  # replicas


def note_replicas(app_name: str, deployment_name: str, known: KnownReplicas) -> None:
    """Note what a router was told."""
    _known[app_name, deployment_name] = known


def known_replicas(app_name: str, deployment_name: str) -> KnownReplicas:
    """Return what was noted last; one replica somewhere before anything was."""
    return _known.get((app_name, deployment_name), _BEFORE_ANY)


def note_silent(replica_id: str, *, is_silent: bool) -> None:
    """Note whether a replica that has calls on its channel gives no sign of life."""
    (_silent.add if is_silent else _silent.discard)(replica_id)


def is_silent(replica_id: str) -> bool:
    """Whether a replica does not answer on its channel."""
    return replica_id in _silent
