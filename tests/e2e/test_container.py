"""The image: built from the Dockerfile, run read-only as its own user, asked over HTTP."""

import subprocess

import httpx
import psutil
import pytest

from tests.support.container_image import Image, built_image
from tests.support.services.live_service import Service

pytestmark = [pytest.mark.container, pytest.mark.slow]
UID = 10001


@pytest.fixture(scope="module")
def image():
    with built_image("localhost/tandem-test") as image:
        yield image


def test_it_serves_from_a_read_only_root_as_its_own_user(image, free_port, photo, tmp_path):
    port, metrics = free_port(), free_port()
    loopback = ("--host", "127.0.0.1", "--metrics-host", "127.0.0.2")
    command = image.command(*loopback, "--port", str(port), "--metrics-port", str(metrics))
    service = Service(port, log=tmp_path / "log.txt", command=command)
    try:
        service.wait_ready()
        process = psutil.Process(service.process.pid)
        started = [process, *process.children(recursive=True)]
        assert {p.uids().real for p in started if p.is_running()} == {UID}
        answer = httpx.post(f"{service.url}/v1/classify", content=photo, timeout=60)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"http://127.0.0.2:{metrics}/metrics", timeout=60).status_code == 200
        assert healthy(image, port)
        assert not healthy(image, free_port())
    finally:
        assert service.stop() == 0, service.log.read_text()


def healthy(image: Image, port: int) -> bool:
    """Run the image's own HEALTHCHECK, of another port."""
    kind, *words = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    environment = [*image.config["Env"], *(word.replace(":8000/", f":{port}/") for word in words)]
    return subprocess.run(image.running("-i", *environment), capture_output=True).returncode == 0


def test_nothing_but_tmp_can_be_written(image):
    said = subprocess.run(
        image.running("sh", "-c", "touch /opt/tandem/x /etc/x /tmp/x; id -u; ls /tmp"),
        capture_output=True,
        text=True,
    )
    assert said.stdout.split() == [str(UID), "x"]
    assert said.stderr.count("Read-only file system") == 2


def test_ray_is_in_a_login_shells_path_and_haproxy_where_the_pods_look(image):
    """KubeRay runs ``bash -lc``; the pods' environment names HAProxy's command."""
    words = ("bash", "-lc", "command -v ray tandem serve wget; test -x /opt/haproxy/haproxy")
    said = subprocess.run(image.running(*words), capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.split()) == 4


def test_the_labels(image):
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.title"] == "Tandem"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
