"""Ray's own commands with the project's serve_config.yaml: ``serve run`` and ``serve deploy``.

In the fast tier: tests/unit/launch/test_config.py reads every file as Serve does,
tests/integration deploys one of them on a Ray that the command did not start, and its
test_shared_serve.py has what ``tandem serve --address`` does beside others and leaves behind.
"""

import os
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.certificates import Root
from tests.support.services.live_service import READY_WITHIN_S, ROOT, Service, label_at
from tests.support.services.processes import descendants, still_running, wait_until
from tests.support.services.ray_head import (
    BIN,
    haproxy_environment,
    ray_head,
    second_node,
    tls_environment,
)
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
def killed_after(service):
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
    service = Service(port, log=tmp_path / "log.txt", command=command, environment=environment)
    with killed_after(service):
        assert service.label(photo) == photo_label
        family = descendants(service.process.pid)
        service.send(signal.SIGINT)
        service.process.wait(STOPPED_WITHIN_S)
        assert still_running(family) == []


@pytest.fixture(scope="module")
def cluster(free_port):
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


@pytest.fixture(scope="module")
def prepared(free_port):
    """A cluster as ``tandem environment`` prepares it: with HAProxy."""
    with tempfile.TemporaryDirectory("", "te-", "/tmp", ignore_cleanup_errors=True) as temp:
        ports = {
            f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")
        }
        with ray_head(Path(temp), free_port, **haproxy_environment(Path(temp)), **ports) as head:
            yield head


@pytest.fixture(scope="module")
def encrypted(free_port):
    """Two nodes that speak TLS to each other. The head runs no replica, so a request needs both."""
    with tempfile.TemporaryDirectory("", "te-", "/tmp", ignore_cleanup_errors=True) as temp:
        tls = tls_environment(Root(folder := Path(temp)))
        with (
            ray_head(folder, free_port, "--num-cpus=0", **tls) as head,
            second_node(head, free_port),
        ):
            yield head


def test_who_has_no_certificate_of_the_clusters_root_does_not_join(encrypted, tmp_path):
    """The token alone is not enough; Ray itself only says so after a minute."""
    others = encrypted.environment | tls_environment(Root(tmp_path))
    without = {k: v for k, v in others.items() if not k.startswith(("RAY_TLS", "RAY_USE_TLS"))}
    at = ("--address", encrypted.address)
    encrypted.run("ray", "health-check", *at)
    commands = [[BIN / "ray", "health-check", *at], [BIN / "tandem", "serve", *at]]
    asked = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        for environment in (others, without)
        for command in commands
    ]
    said = [process.communicate(timeout=180)[1] for process in asked]
    assert [process.returncode != 0 for process in asked] == [True] * 4
    assert all(b"or wants other TLS than this command's" in text for text in said[1::2]), said


@pytest.mark.parametrize("which", ["cluster", "prepared", "encrypted"])
def test_tandem_serve_joins_a_cluster_and_leaves_it_as_it_was(
    which, request, tmp_path, free_port, photo, photo_label
):
    port, cluster = free_port(), request.getfixturevalue(which)
    command = [str(BIN / "tandem"), "serve", "--port", str(port), "--address", cluster.address]
    log = tmp_path / "log.txt"
    service = Service(port, log=log, command=command, environment=cluster.environment)
    with killed_after(service):
        assert service.label(photo) == photo_label
        service.send(signal.SIGINT)
        # 4 to 5 s on a busy machine; Serve's own 30 s for a load balancer is more than this.
        assert service.process.wait(10) == 0, log.read_text()
    assert "failed to shut down" not in log.read_text()
    assert not service.is_ready()
    assert cluster.replicas() == set()
    cluster.run("ray", "status", "--address", cluster.address)  # it lives on
