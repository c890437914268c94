"""A Ray that ``ray start`` starts on this machine, with a token of its own; killed at the end."""

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from ray.util import get_node_ip_address

from app.environment import HAPROXY_COMMAND, node_environment
from app.launch.haproxy import HaproxyCommand
from tests.support.certificates import Root
from tests.support.services.ends_with_parent import ending_with_parent
from tests.support.services.live_service import READY_WITHIN_S, ROOT
from tests.support.services.processes import descendants, title, wait_until

BIN = Path(sys.executable).parent
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")


@dataclass(frozen=True)
class RayHead:
    """A head that runs replicas too."""

    process: psutil.Process
    address: str
    dashboard: str
    environment: dict[str, str]  # of commands that join it
    headers: dict[str, str]  # of requests to the dashboard
    log: Path  # standard error

    def is_ok(self, url: str) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url, headers=self.headers, timeout=5).status_code == 200
        return False

    def replicas(self) -> set[psutil.Process]:
        return {p for p in descendants(self.process.pid) if "ray::ServeReplica" in title(p)}

    def run(self, name: str, *arguments: str) -> None:
        """Run a command of this environment's ``bin`` folder that knows the token."""
        words = [str(BIN / name), *arguments]
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def ray_head(folder, free_port, *options, **environment):
    """Start it with its files in ``folder``, whose path must be short; yield it when it is up."""
    (folder / "token").write_text(token := secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/token"}
    own = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment, **own}
    ports = {name: free_port() for name in PORTS}
    place = ("--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray", "--num-cpus=2")
    numbers = (f"--{name}={port}" for name, port in ports.items())
    command = [str(BIN / "ray"), "start", "--head", "--block", *place, *numbers, *options]
    with (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            ending_with_parent(command), cwd=ROOT, env=own, stdout=subprocess.DEVNULL,
            stderr=stderr, start_new_session=True,
        )  # fmt: skip
    root = psutil.Process(process.pid)
    address, dashboard = (f"127.0.0.1:{ports[name]}" for name in PORTS[:2])
    headers = {"authorization": f"Bearer {token}"}
    head = RayHead(root, address, f"http://{dashboard}", own, headers, folder / "stderr.txt")
    with _killed_after(process):
        health = f"{head.dashboard}/api/gcs_healthz"
        wait_until(lambda: head.is_ok(health), READY_WITHIN_S, "the head")
        yield head


@contextmanager
def _killed_after(process):
    root = psutil.Process(process.pid)
    try:
        yield
    finally:
        family = root.children(recursive=True)
        for child in (*family, root):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                child.kill()
        psutil.wait_procs(family, timeout=10)
        process.wait(10)


@contextmanager
def second_node(head: RayHead, free_port):
    """Start another node of two CPUs on this machine, and wait until it has joined."""
    names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port")
    ports = [f"--{name}={free_port()}" for name in (*names, "metrics-export-port")]
    command = [str(BIN / "ray"), "start", "--block", f"--address={head.address}", "--num-cpus=2"]
    of_proxies = ("RAY_SERVE_WORKER_PROXY_HTTP_PORT", "RAY_SERVE_WORKER_PROXY_GRPC_PORT")
    own = head.environment | {name: str(free_port()) for name in of_proxies}
    process = subprocess.Popen(
        ending_with_parent([*command, "--node-ip-address=127.0.0.1", *ports]), cwd=ROOT, env=own,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    nodes = f"{head.dashboard}/nodes?view=summary"

    def has_joined() -> bool:
        answer = httpx.get(nodes, headers=head.headers, timeout=5)
        return answer.is_success and len(answer.json()["data"]["summary"]) == 2

    with _killed_after(process):
        wait_until(has_joined, READY_WITHIN_S, "the second node")
        yield


def tls_environment(root: Root) -> dict[str, str]:
    """Return Ray's variables for TLS between nodes, all with one certificate of this root.

    It has the machine's own address too, which Ray takes in place of 127.0.0.1.
    """
    node = root.sign("node", None, get_node_ip_address())
    files = {"CA_CERT": root.path, "SERVER_CERT": node.certificate, "SERVER_KEY": node.key}
    return {"RAY_USE_TLS": "1"} | {f"RAY_TLS_{name}": str(path) for name, path in files.items()}


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Return what ``tandem environment`` gives every node, and files apart from other clusters'."""
    HaproxyCommand(folder / HAPROXY_COMMAND, ports=None).write()
    return node_environment(folder / HAPROXY_COMMAND) | {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/serve/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/serve/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/serve",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/serve/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/serve/metrics.sock",
        "PYTHONPATH": str(ROOT),
    }
