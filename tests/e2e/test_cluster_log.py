"""A Ray node started as KubeRay starts a pod's: what ``kubectl logs`` would show of it is JSON.

In the fast tier: tests/unit/serve/test_serve_policy.py has the handlers that Ray makes, and
test_kubernetes.py the pods' environment and the options of ``ray start``.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.environment import HAPROXY_COMMAND, node_environment
from app.launch.config import ServeConfig
from app.launch.haproxy import HaproxyCommand
from models.manifest import read_manifest
from tests.support.services.ends_with_parent import ending_with_parent
from tests.support.services.live_service import READY_WITHIN_S, ROOT
from tests.support.services.processes import wait_until

pytestmark = pytest.mark.slow
RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Pod:
    """A head that runs replicas too: one pod for all."""

    log: Path
    dashboard: str
    url: str
    headers: dict[str, str]
    process: psutil.Process

    def deploy(self, content: dict[str, Any]) -> None:
        """As KubeRay does."""
        url = f"{self.dashboard}/api/serve/applications/"
        httpx.put(url, json=content, headers=self.headers, timeout=60).raise_for_status()

    def is_ok(self, url: str) -> bool:
        try:
            return httpx.get(url, headers=self.headers, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def lines(self) -> list[dict[str, Any]]:
        """Return what is JSON of the log so far."""
        whole = self.log.read_text("utf-8").rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line.startswith("{")]

    def replicas(self) -> list[psutil.Process]:
        found = []
        for process in self.process.children(recursive=True):
            try:
                if "ray::ServeReplica:tandem:Gateway" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:  # it ended while we looked
                continue
        return found


@pytest.fixture
def pod(free_port: Callable[[], int]) -> Iterator[Pod]:
    with tempfile.TemporaryDirectory("", "tl-", "/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "token").write_text(token := secrets.token_hex(32))
        HaproxyCommand(folder / HAPROXY_COMMAND, ports=None).write()
        serve = {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/serve/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/serve/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/serve",
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/serve/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/serve/metrics.sock",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }
        environment = node_environment(folder / HAPROXY_COMMAND) | serve
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/token"}
        environment |= {"RAY_SERVE_LOG_TO_STDERR": "1", "PYTHONPATH": str(ROOT)}
        ports = ("port", "ray-client-server-port", "dashboard-agent-listen-port")
        options = [f"--{option}={free_port()}" for option in ports]
        dashboard, log = free_port(), folder / "stderr.txt"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                ending_with_parent(
                    [
                        *(str(RAY), "start", "--head", "--block", "--no-redirect-output", *options),
                        *(f"--temp-dir={folder}/ray", "--num-cpus=2"),
                        *(f"--dashboard-port={dashboard}", "--node-ip-address=127.0.0.1"),
                    ]
                ),
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{free_port()}"
        try:
            root = psutil.Process(process.pid)
            headers = {"authorization": f"Bearer {token}"}
            yield Pod(log, f"http://127.0.0.1:{dashboard}", url, headers, root)
        finally:
            family = root.children(recursive=True)
            for child in family:
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    child.kill()
            process.kill()
            psutil.wait_procs(family, timeout=10)
            process.wait(10)


def test_what_a_pods_stages_and_serves_controller_say_is_json(pod: Pod, tiny_set: Path) -> None:
    """A start, a replica that dies, the next; what Ray says of itself stays text."""
    config = ServeConfig.read(ROOT / "configs" / "cluster-whole.yaml").changed(
        http={"host": "127.0.0.1", "port": int(pod.url.rpartition(":")[2])}, model_set=str(tiny_set)
    )
    config = config.changed(streams=1, compile_cache=None, trace_exporter="none")
    content = config.fitted_to(read_manifest(tiny_set)).as_dict()
    (gateway,) = content["applications"][0]["deployments"]
    gateway["ray_actor_options"] = {"num_cpus": 1}
    gateway["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}
    wait_until(lambda: pod.is_ok(f"{pod.dashboard}/api/gcs_healthz"), READY_WITHIN_S, "the head")
    pod.deploy(content)
    wait_until(lambda: pod.is_ok(f"{pod.url}/readyz"), READY_WITHIN_S, "the service")
    first = pod.replicas()
    for replica in first:
        replica.kill()

    def is_replaced() -> bool:
        return bool(set(pod.replicas()) - set(first)) and pod.is_ok(f"{pod.url}/readyz")

    wait_until(is_replaced, READY_WITHIN_S, "the next replica")
    said = [line for line in pod.lines() if line["message"] == "serving model set tiny, INT8"]
    assert len({line["process"] for line in said}) == len(first) + 1
    assert {line["deployment"] for line in said} == {"tandem_Gateway"}
    (lost,) = (line for line in pod.lines() if "crashed, marking it unhealthy" in line["message"])
    assert (lost["component_name"], lost["levelname"]) == ("controller", "WARNING")
    text = [line for line in pod.log.read_text("utf-8").splitlines() if not line.startswith("{")]
    ours = ("serving model set", "runs on openvino", "no golden answers", "crashed, marking it")
    assert [line for line in text if any(words in line for words in ours)] == []
