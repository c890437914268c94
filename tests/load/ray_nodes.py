"""A Ray cluster of several nodes on this one machine, each by a ``ray start`` of its own.

All have the loopback address, and ports keep them apart, or each has a place on a network. Serve
gives a worker's HAProxy the port that its node's environment names, so every node has an ingress of
its own. A node ends as a machine does that loses its power: everything it runs is killed at once,
by pid.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
from machine import ROOT

from app.launch.checks import free_port
from tests.support.redis_server import RedisServer
from tests.support.services.network import Network, Place

RAY = Path(sys.executable).with_name("ray")
STORE_BYTES = 80 * 2**20  # of each node's object store; the graph uses none
JOINED_WITHIN_S = 180.0
LAST = 19  # of a process's niceness
DISK_MB = 96
# What Ray and HAProxy write there is on a small disk, and no node sees another's.
SUPERVISED = """
mkdir -p {folder}/ray {folder}/serve
mount -t tmpfs -o size={megabytes}m none {folder}/ray
mkdir {folder}/ray/serve
mount --bind {folder}/ray/serve {folder}/serve
while :; do rm -f {folder}/ray/ray_current_cluster; "$@" || :; sleep 1; done
"""
BEHIND = ("dashboard/dashboard.py", "monitor.py", "client.server")  # of a head's processes
PORT_OPTIONS = (
    "node-manager-port",
    "object-manager-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
)


def is_ok(url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Return whether the address answers 200."""
    try:
        return httpx.get(url, headers=headers, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class RayNode:
    """One ``ray start`` and everything below it."""

    def __init__(
        self,
        name: str,
        place: Place,
        arguments: list[str],
        environment: Mapping[str, str],
        http_port: int | None = None,
        supervisor: tuple[str, ...] = (),  # a command that runs the command behind it
        disk: Path | None = None,  # what is mounted there is this node's alone
    ) -> None:
        self._disk = disk
        self.name, self.place = name, place
        self.http_port, haproxy = http_port or free_port(), (free_port(), free_port())
        ports = [f"--{option}={free_port()}" for option in PORT_OPTIONS]
        own = {
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.http_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(haproxy[0]),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(haproxy[1]),
        }
        common = [
            f"--node-ip-address={place.address}",
            f"--object-store-memory={STORE_BYTES}",
            "--block",
        ]
        self._process = subprocess.Popen(
            [*place.prefix, *supervisor, str(RAY), "start", *arguments, *common, *ports],
            cwd=ROOT,
            env={**os.environ, **environment, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        return f"http://{self.place.address}:{self.http_port}"

    @property
    def disk(self) -> Path:
        """Where others find this node's own disk."""
        return Path(f"/proc/{self._process.pid}/root{self._disk}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return what the node runs now, itself included."""
        if not self.is_alive:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def kill(self) -> None:
        """Kill every process of the node, all of them before any can take leave."""
        family = self.processes()
        for process in family:
            process.suspend()  # so that nothing starts another meanwhile
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=10)


class RayCluster:
    """A head that runs no replica, and workers."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        worker_cpus: int,
        network: Network | None = None,
        redis: RedisServer | None = None,  # where the head keeps what outlives it
        *,
        is_supervised: bool = False,  # workers, each with a disk of its own, start again for ever
    ) -> None:
        self._network, self._is_supervised, self._folder = network, is_supervised, folder
        self.has_redis = redis is not None
        # A Ray that starts here listens on all interfaces: nobody else may join it.
        self.token = secrets.token_hex(32)
        (file := folder / "token").write_text(self.token)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
        self._environment, self._worker_cpus = {**environment, **token}, worker_cpus
        self._port, self._num_started = free_port(), 0
        self._temp_dir, self.clock = folder / "ray", folder / "clock"
        self.dashboard = f"http://127.0.0.1:{(dashboard := free_port())}"
        self._head_arguments = [
            "--head",
            "--num-cpus=0",
            f"--port={self._port}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={self._temp_dir}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]
        # A worker waits for a head that comes back as long as KubeRay lets it.
        wait = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"} if redis else {}
        self._environment.update(wait)
        self._redis = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}"} if redis else {}
        self._head_http_port = free_port()
        self.workers: list[RayNode] = []
        self.start_head()

    def start_head(self) -> None:
        """Start the head, or start it again where it was, until it stays (as a kubelet would).

        A raylet ends itself where its agent is not there after 15 s, so the head goes first if the
        user may say so. A head has a machine of its own, without a worker or a file of before:
        ``ray start`` takes a worker's raylet for the head's where that file says so.
        """
        again = (
            f'until rm -f {self._temp_dir}/ray_current_cluster && nice -n -15 "$0" "$@"; do :; done'
        )
        place = self._network.here if self._network else Place()
        environment = {**self._environment, **self._redis}
        self.head = RayNode(
            "head",
            place,
            self._head_arguments,
            environment,
            self._head_http_port,
            supervisor=("sh", "-c", again),
        )
        threading.Thread(target=self._put_others_last, args=(self.head,), daemon=True).start()

    @staticmethod
    def _put_others_last(head: RayNode) -> None:
        """Let the dashboard and others start behind the agent, which has 15 s for it."""
        while head.is_alive:
            with contextlib.suppress(psutil.Error):  # some end while we look
                for process in head.processes():
                    command = " ".join(process.cmdline())
                    if any(name in command for name in BEHIND) and process.nice() < LAST:
                        process.nice(LAST)  # and so are those that it starts
            time.sleep(0.2)

    @property
    def nodes(self) -> list[RayNode]:
        nodes = (self.head, *self.workers)
        return [node for node in nodes if node.is_alive]

    def wait_for_head(self, within_s: float = 120) -> None:
        """Wait until others can join."""
        deadline = time.monotonic() + within_s
        health = f"{self.dashboard}/api/gcs_healthz"
        while not is_ok(health, self.headers):
            if not self.head.is_alive or time.monotonic() > deadline:
                raise SystemExit(f"the head node did not start within {within_s:g} s")
            time.sleep(0.5)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def add_worker(self, environment: Mapping[str, str] = MappingProxyType({})) -> RayNode:
        """Start a worker and wait until it has joined: two at once would take the same socket."""
        self._num_started += 1
        name = f"worker {self._num_started}"
        head = f"{self.head.place.address}:{self._port}"
        arguments = [f"--address={head}", f"--num-cpus={self._worker_cpus}"]
        known = self._alive()
        place = self._network.add() if self._network else Place()
        own = SUPERVISED.format(folder=self._folder, megabytes=DISK_MB)
        supervisor = ("unshare", "--mount", "sh", "-ec", own, "sh") if self._is_supervised else ()
        environment = {**self._environment, **environment}
        disk = self._temp_dir
        node = RayNode(name, place, arguments, environment, supervisor=supervisor, disk=disk)
        self.workers.append(node)
        deadline = time.monotonic() + JOINED_WITHIN_S
        while not self._alive() - known:
            if not node.is_alive or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not join within {JOINED_WITHIN_S:g} s")
            time.sleep(0.2)
        return node

    def drain(self, node: RayNode) -> None:
        """Tell Ray to send nothing new to the node, and to move what it runs."""
        (node_id,) = self._alive(node.place.address)
        head = f"--address={self.head.place.address}:{self._port}"
        why = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test")
        words = [str(RAY), "drain-node", head, "--node-id", node_id, *why]
        words.append("--deadline-remaining-seconds=60")
        subprocess.run(words, env={**os.environ, **self._environment}, check=True, timeout=60)

    def _alive(self, address: str = "") -> set[str]:
        """Return the ids of the nodes that Ray says are alive, there or anywhere."""
        url = f"{self.dashboard}/nodes?view=summary"
        answer = httpx.get(url, headers=self.headers, timeout=10, trust_env=False)
        rows = [row["raylet"] for row in answer.raise_for_status().json()["data"]["summary"]]
        there = [row for row in rows if address in ("", row.get("nodeManagerAddress"))]
        return {row["nodeId"] for row in there if row.get("state") == "ALIVE"}

    def stop(self) -> None:
        """End everything, workers first: none looks for a head that is gone."""
        for node in (*self.workers, self.head):
            node.kill()
        if self._network:
            self._network.stop()
