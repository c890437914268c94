"""What can die. What is killed is killed by pid, and at once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from ray_nodes import RayCluster, RayNode
from serve_state import ServeState, titled


@dataclass
class Setting:
    """The cluster, the worker that the load comes in through, and another."""

    cluster: RayCluster
    state: ServeState
    entry: RayNode
    other: RayNode

    def placement(self) -> dict[str, dict[str, int]]:
        """Count the replicas of each deployment by node."""
        found: dict[str, Counter[str]] = {}
        for replica in self.state.replicas():
            node = self.state.node_of(replica.pid).name
            found.setdefault(replica.deployment, Counter())[node] += 1
        return {name: dict(counted) for name, counted in found.items()}


@dataclass(frozen=True)
class Fault:
    """A kill, told in words; it returns the pids that must not be seen running again."""

    told: str
    strike: Callable[[Setting], frozenset[int]]
    deployment: str | None = None  # that it strikes; None: there always is something


def _replica(deployment: str) -> Callable[[Setting], frozenset[int]]:
    def strike(setting: Setting) -> frozenset[int]:
        pids = [one.pid for one in setting.state.replicas() if one.deployment == deployment]
        return _killed([psutil.Process(pids[0])])

    return strike


def _hang(setting: Setting) -> frozenset[int]:
    """Stop a member's replica, or a Gateway's, which has the members where they are not apart."""
    replicas = setting.state.replicas()
    name = "sure" if any(one.deployment == "sure" for one in replicas) else "Gateway"
    pids = [one.pid for one in replicas if one.deployment == name]
    psutil.Process(pids[0]).suspend()
    return frozenset(pids[:1])


def _node(setting: Setting) -> frozenset[int]:
    pids = frozenset(process.pid for process in setting.other.processes())
    setting.other.kill()
    setting.other = setting.cluster.add_worker()  # as whoever runs the cluster would
    return pids


def _haproxy(is_entry: bool) -> Callable[[Setting], frozenset[int]]:
    def strike(setting: Setting) -> frozenset[int]:
        return _killed(titled(setting.entry if is_entry else setting.other, "haproxy.cfg"))

    return strike


def _controller(setting: Setting) -> frozenset[int]:
    return _killed(titled(setting.cluster.head, "ray::ServeController"))


def _head(setting: Setting) -> frozenset[int]:
    pids = frozenset(process.pid for process in setting.cluster.head.processes())
    setting.cluster.head.kill()
    setting.cluster.start_head()  # as KubeRay starts a pod again; what it knew is in Redis
    return pids


def _killed(processes: list[psutil.Process]) -> frozenset[int]:
    if not processes:
        raise SystemExit("there is no such process to kill")
    for process in processes:
        process.kill()
    return frozenset(process.pid for process in processes)


FAULTS = {
    "member": Fault("a member's replica", _replica("sure"), "sure"),
    "decoder": Fault("a Decoder's replica", _replica("Decoder"), "Decoder"),
    "gateway": Fault("a Gateway's replica", _replica("Gateway")),
    "hang": Fault("a replica with a member, which hangs (SIGSTOP)", _hang),
    "controller": Fault("Serve's controller", _controller),
    "head": Fault("the head node, all of it, which comes back to its state in Redis", _head),
    "haproxy": Fault("HAProxy of a node that the load does not come in through", _haproxy(False)),
    "entry": Fault("HAProxy of the node that the load comes in through", _haproxy(True)),
    "node": Fault("a worker node, all of it", _node),
}
