"""What happens to a node with a network before it, for a time, and what happens meanwhile."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray_nodes import RayCluster, RayNode
from serve_state import ServeState, titled

Effect = Callable[["Scene"], AbstractContextManager[None]]
GROUP = "tandem-slow-node"
GATEWAY = "ray::ServeReplica:tandem:Gateway"
DELAY_MS = 0.5  # of each way of every link: 1 ms from node to node


@dataclass
class Scene:
    """The cluster, its application, and the node that is struck."""

    cluster: RayCluster
    state: ServeState
    content: dict[str, Any]  # what is deployed
    victim: RayNode
    gone: frozenset[int] = field(default=frozenset())  # pids that must not be seen running again


@dataclass(frozen=True)
class Row:
    """An effect, told in words, and how long it lasts."""

    told: str
    effect: Effect
    lasts_s: float
    needs: str = ""  # redis, clock, disk: what the cluster must have
    is_reached: bool = True  # whether the node shall go on being sent to meanwhile


def _link(**shape: float) -> Effect:
    @contextmanager
    def effect(scene: Scene) -> Iterator[None]:
        scene.victim.place.shape(**{"delay_ms": DELAY_MS, **shape})
        try:
            yield
        finally:
            scene.victim.place.shape(delay_ms=DELAY_MS)

    return effect


CUT = _link(loss=1.0)


def _slow(share: float) -> Effect:
    """Give all of a node this share of a core, by a control group of either version."""

    @contextmanager
    def effect(scene: Scene) -> Iterator[None]:
        first = Path("/sys/fs/cgroup/cpu")
        group = (first if first.is_dir() else first.parent) / GROUP
        group.mkdir(exist_ok=True)
        try:
            quota_us = int(share * 100_000)  # of each 100 ms
            if first.is_dir():
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} 100000")
            for process in scene.victim.processes():
                with contextlib.suppress(OSError):  # it ended while we looked
                    (group / "cgroup.procs").write_text(str(process.pid))
            yield
        finally:
            while pids := (group / "cgroup.procs").read_text().split():
                for pid in pids:
                    with contextlib.suppress(OSError):
                        (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()

    return effect


def _killed(
    title: str, number: signal.Signals = signal.SIGKILL, *, on_head: bool = False
) -> Effect:
    """Kill the node's processes of this title, or stop them for as long as it lasts."""

    @contextmanager
    def effect(scene: Scene) -> Iterator[None]:
        found = titled(scene.cluster.head if on_head else scene.victim, title)
        if not found:
            raise SystemExit(f"there is no {title} to kill")
        scene.gone = frozenset(process.pid for process in found)
        for process in found:
            process.send_signal(number)
        yield
        for process in found:
            with contextlib.suppress(psutil.Error):  # it ended long ago
                process.resume()

    return effect


@contextmanager
def _drained(scene: Scene) -> Iterator[None]:
    """Let Ray empty the node, then end it; its supervisor starts it again."""
    scene.cluster.drain(scene.victim)
    yield
    family = scene.victim.processes()[1:]
    scene.gone = frozenset(process.pid for process in family)
    for process in family:
        with contextlib.suppress(psutil.Error):  # it ended with another
            process.kill()


@contextmanager
def _updated(scene: Scene) -> Iterator[None]:
    """Deploy what replaces every replica, while the node is cut off."""
    (application,) = scene.content["applications"]
    application["args"]["decode_threads"] ^= 1
    scene.gone = frozenset(one.pid for one in scene.state.replicas())
    with CUT(scene):
        scene.state.deploy(scene.content)
        yield


@contextmanager
def _headless(scene: Scene) -> Iterator[None]:
    """Kill the head, and start it again where it was; without its state, deploy again."""
    scene.cluster.head.kill()
    scene.cluster.start_head()
    yield
    if not scene.cluster.has_redis:
        scene.cluster.wait_for_head()
        scene.state.deploy(scene.content)


@contextmanager
def _full(scene: Scene) -> Iterator[None]:
    """Fill the disk that has the node's logs, sockets and HAProxy's files."""
    file = scene.victim.disk / "filling"
    with file.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while filling.write(bytes(size)):
                    pass
    try:
        assert os.statvfs(file).f_bavail == 0, "the disk is not full"
        yield
    finally:
        file.unlink()


@contextmanager
def _late(scene: Scene) -> Iterator[None]:
    """Set the node's clock 30 s on: libfaketime reads the file every second."""
    scene.cluster.clock.write_text("+30s\n")
    try:
        yield
    finally:
        scene.cluster.clock.write_text("+0s\n")


ROWS = {
    "cut-5": Row("a node is cut off for 5 s", CUT, 5, is_reached=False),
    "cut-60": Row("a node is cut off for 60 s", CUT, 60, is_reached=False),
    "loss-1": Row("1 % of a node's frames are lost, each way", _link(loss=0.01), 20),
    "loss-10": Row("10 % of a node's frames are lost, each way", _link(loss=0.1), 20),
    "latency": Row("a node's link has 50 ms each way", _link(delay_ms=50), 20),
    "narrow": Row("a node's link has 2 Mbit/s", _link(mbit_s=2), 20),
    "slow": Row("a node has 10 % of a core", _slow(0.1), 20, is_reached=False),
    "crawl": Row("a node has 2 % of a core", _slow(0.02), 20, is_reached=False),
    "drain": Row("a node is emptied by ray drain-node", _drained, 30),
    "update": Row("an update, with a node cut off for 10 s", _updated, 10, is_reached=False),
    "disk": Row("a node's disk is full", _full, 20, needs="disk"),
    "clock": Row("a node's clock goes 30 s on, and back", _late, 20, needs="clock"),
    "head": Row("the head is killed, and comes back to its state in Redis", _headless, 0, "redis"),
    "head-alone": Row("the head is killed, comes back empty, and is deployed to", _headless, 0),
    "gateway": Row("a node's Gateways are killed", _killed(GATEWAY), 5),
    "gateway-stopped": Row("a node's Gateways are stopped", _killed(GATEWAY, signal.SIGSTOP), 30),
    "controller": Row(
        "Serve's controller is killed", _killed("ray::ServeController", on_head=True), 5
    ),
    "proxy": Row("the head's ProxyActor is killed", _killed("ray::ProxyActor", on_head=True), 5),
    "haproxy": Row("a node's HAProxy is killed", _killed("haproxy.cfg"), 5),
    "haproxy-manager": Row("a node's HAProxyManager is killed", _killed("ray::HAProxyManager"), 5),
    "agent": Row("a node's DashboardAgent is killed", _killed("dashboard/agent.py"), 10),
    "raylet": Row("a node's raylet is killed", _killed("/raylet/raylet"), 10),
}
