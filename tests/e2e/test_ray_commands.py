"""Ray's own commands with the project's serve_config.yaml: ``serve run`` and ``serve deploy``.

In the fast tier: tests/unit/launch/test_config.py reads every file as Serve does,
tests/integration deploys one of them on a Ray that the command did not start, and its
test_shared_serve.py has what ``tandem serve --address`` does beside others and leaves behind.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.services.live_service import READY_WITHIN_S, ROOT, Service, label_at
from tests.support.services.processes import descendants, still_running, wait_until
from tests.support.services.ray_head import BIN, RayHead, ray_head
from tests.support.services.stopping import STOPPED_WITHIN_S

pytestmark = pytest.mark.slow


def config_at(port: int, folder: Path) -> Path:
    """Return a copy of the project's configuration that differs in nothing but the port."""
    text = (ROOT / "serve_config.yaml").read_text("utf-8")
    assert "port: 8000\n" in text
    path = folder / "copy.yaml"
    path.write_text(text.replace("port: 8000\n", f"port: {port}\n"), "utf-8")
    return path


@contextmanager
def killed_after(service: Service) -> Iterator[None]:
    """End what is left of these very processes; ``ray stop`` would end every Ray there is."""
    family: set[psutil.Process] = set()
    try:
        service.wait_answering()
        family = descendants(service.process.pid)
        yield
    finally:
        if service.process.poll() is None:
            family |= descendants(service.process.pid)
        for process in family:
            if process.is_running():
                process.kill()
        service.process.wait(10)


def test_serve_run_answers_and_stops(tmp_path, temp, free_port, photo, photo_label):
    port = free_port()
    # The session's own service, which other tests share, keeps its Ray; this one has its own.
    command = [str(BIN / "serve"), "run", str(config_at(port, tmp_path)), "--address", "local"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(temp)}
    log = tmp_path / "log.txt"
    service = Service(port, log=log, command=command, environment=environment)
    with killed_after(service):
        assert service.label(photo) == photo_label
        family = descendants(service.process.pid)
        service.send(signal.SIGINT)
        service.process.wait(STOPPED_WITHIN_S)
        assert still_running(family) == []


@pytest.fixture(scope="module")
def cluster(free_port) -> Iterator[RayHead]:
    """A cluster that serves nothing; each test takes away what it has put there."""
    with (
        tempfile.TemporaryDirectory(prefix="te-", dir="/tmp", ignore_cleanup_errors=True) as temp,
        ray_head(Path(temp), free_port) as head,
    ):
        yield head


def test_serve_deploy_answers(cluster, tmp_path, free_port, photo, photo_label):
    port = free_port()
    at = ("--address", cluster.dashboard)
    cluster.run("serve", "deploy", str(config_at(port, tmp_path)), *at)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: cluster.is_ok(f"{url}/readyz"), READY_WITHIN_S, "serve deploy")
        assert label_at(url, photo) == photo_label
    finally:
        cluster.run("serve", "shutdown", "--yes", *at)
    wait_until(lambda: not cluster.replicas(), STOPPED_WITHIN_S, "the end of the replicas")


def test_tandem_serve_joins_a_cluster_and_leaves_it_as_it_was(
    cluster, tmp_path, free_port, photo, photo_label
):
    port = free_port()
    command = [str(BIN / "tandem"), "serve", "--port", str(port), "--address", cluster.address]
    log = tmp_path / "log.txt"
    service = Service(port, log=log, command=command, environment=cluster.environment)
    with killed_after(service):
        assert service.label(photo) == photo_label
        service.send(signal.SIGINT)
        assert service.process.wait(STOPPED_WITHIN_S) == 0, log.read_text()
    assert not service.is_ready()
    assert cluster.replicas() == set()
    cluster.run("ray", "status", "--address", cluster.address)  # it lives on
