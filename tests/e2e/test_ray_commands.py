"""Ray's own commands with the project's serve_config.yaml: ``serve run`` and ``serve deploy``.

In the fast tier: tests/unit/launch/test_config_check.py reads every file as Serve does,
tests/integration deploys one of them on a Ray that the command did not start, and its
test_shared_serve.py has what ``tandem serve --address`` does beside others and leaves behind.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.services.ends_with_parent import ending_with_parent
from tests.support.services.live_service import READY_WITHIN_S, ROOT
from tests.support.services.processes import descendants, still_running, title, wait_until
from tests.support.services.stopping import STOPPED_WITHIN_S

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
# The session's own service, which other tests share, keeps its Ray; these have theirs.
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}


def config_at(port: int, folder: Path) -> Path:
    """Return a copy of the project's configuration that differs in nothing but the port."""
    text = (ROOT / "serve_config.yaml").read_text("utf-8")
    assert "port: 8000\n" in text
    path = folder / "copy.yaml"
    path.write_text(text.replace("port: 8000\n", f"port: {port}\n"), "utf-8")
    return path


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def label(url: str, photo: bytes) -> str:
    answer = httpx.post(f"{url}/v1/classify", content=photo, timeout=60)
    return answer.raise_for_status().json()["predictions"][0]["label"]


def test_serve_run_answers_and_stops(
    tmp_path: Path, temp: Path, free_port: Callable[[], int], photo: bytes, photo_label: str
) -> None:
    port, log = free_port(), tmp_path / "log.txt"
    command: list[str | Path] = [
        BIN / "serve",
        "run",
        str(config_at(port, tmp_path)),
        "--address",
        "local",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ending_with_parent(command),
            cwd=ROOT,
            env=ENVIRONMENT | {"TMPDIR": str(temp)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family: set[psutil.Process] = set()
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url) or process.poll() is not None, READY_WITHIN_S, "serve run")
        assert process.poll() is None, log.read_text()
        assert label(url, photo) == photo_label
        family = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(STOPPED_WITHIN_S)
        assert still_running(family) == []
    finally:
        stop(family | ({psutil.Process(process.pid)} if process.poll() is None else set()))
        process.wait(10)


def stop(processes: set[psutil.Process]) -> None:
    """End what is left of these very processes; ``ray stop`` would end every Ray there is."""
    for process in processes:
        if process.is_running():
            process.kill()
    psutil.wait_procs(list(processes), timeout=10)


@dataclass(frozen=True)
class Cluster:
    """A Ray started by ``ray start``, with a token of its own: authentication stays on."""

    folder: Path
    dashboard: str
    address: str
    environment: dict[str, str]

    def processes(self) -> set[psutil.Process]:
        roots = [p for p in psutil.process_iter() if f"{self.folder}/session" in title(p)]
        return {child for root in roots for child in (root, *root.children(recursive=True))}

    def replicas(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "ray::ServeReplica" in title(p)]

    def run(self, *command: str) -> None:
        done = subprocess.run(
            [BIN / command[0], *command[1:]],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Cluster]:
    """A cluster that serves nothing; each test takes away what it has put there."""
    token, dashboard = tmp_path_factory.mktemp("cluster") / "token", free_port()
    token.write_text(secrets.token_hex(32))
    environment = ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with tempfile.TemporaryDirectory(prefix="te-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        port = free_port()
        started = Cluster(
            Path(temp), f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", environment
        )
        ports = {
            "--port": port,
            "--dashboard-port": dashboard,
            "--dashboard-agent-listen-port": free_port(),
            "--ray-client-server-port": free_port(),
        }
        numbers = [f"{option}={port}" for option, port in ports.items()]
        try:
            started.run("ray", "start", "--head", f"--temp-dir={temp}", "--num-cpus=2", *numbers)
            yield started
        finally:
            stop(started.processes())
        assert started.processes() == set()


def test_serve_deploy_answers(
    cluster: Cluster,
    tmp_path: Path,
    free_port: Callable[[], int],
    photo: bytes,
    photo_label: str,
) -> None:
    port = free_port()
    config = config_at(port, tmp_path)
    cluster.run("serve", "deploy", str(config), "--address", cluster.dashboard)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), READY_WITHIN_S, "serve deploy")
        assert label(url, photo) == photo_label
    finally:
        cluster.run("serve", "shutdown", "--yes", "--address", cluster.dashboard)
    wait_until(lambda: cluster.replicas() == [], STOPPED_WITHIN_S, "the end of the replicas")


def test_tandem_serve_joins_a_cluster_and_leaves_it_as_it_was(
    cluster: Cluster,
    tmp_path: Path,
    free_port: Callable[[], int],
    photo: bytes,
    photo_label: str,
) -> None:
    port, log = free_port(), tmp_path / "log.txt"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ending_with_parent(
                [BIN / "tandem", "serve", "--port", str(port), "--address", cluster.address]
            ),
            cwd=ROOT,
            env=cluster.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: is_ready(url) or process.poll() is not None, READY_WITHIN_S, "join")
        assert process.poll() is None, log.read_text()
        assert label(url, photo) == photo_label
        process.send_signal(signal.SIGINT)
        assert process.wait(STOPPED_WITHIN_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
    assert not is_ready(url)
    assert cluster.replicas() == []
    cluster.run("ray", "status", "--address", cluster.address)  # it lives on
