"""``TANDEM_PORTABLE=1``: Serve's own proxy in HAProxy's place, as on a Mac; nothing reachable.

``make test`` has the default settings in shipped/test_http.py and shipped/test_grpc.py.
"""

import signal

import grpc
import httpx
import pytest

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.services import processes
from tests.support.services.stopping import stop_and_check

pytestmark = pytest.mark.slow

REFUSED_WITHIN_S = 60


@pytest.fixture(autouse=True, scope="module")
def _portable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_PORTABLE", "1")
        yield


@pytest.fixture(scope="module")
def metrics_port(free_port) -> int:
    return free_port()


@pytest.fixture(scope="module")
def portable(start_process, grpc_port, metrics_port):
    """The service, which is stopped by Ctrl-C, and leaves nothing."""
    started = start_process("--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port))
    try:
        started.wait_ready()
        yield started
        stop_and_check(started, signal.SIGINT, is_for_all=True)
    finally:
        started.stop()  # if that went wrong


@pytest.fixture(scope="module")
def client(portable):
    with httpx.Client(base_url=portable.url, timeout=60, trust_env=False) as client:
        yield client


def test_photographs_over_http_and_grpc(client, grpc_port, photo, photo_label):
    answer = client.post("/v1/classify", content=photo)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0]["label"] == photo_label
    files = [("files", ("a.jpg", photo)), ("files", ("b.jpg", b"no photo"))]
    good, bad = client.post("/v1/classify", files=files).json()["results"]
    assert good["predictions"] == answer.json()["predictions"]
    assert bad["error"]["code"] == "not_an_image"
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        reply = EnsembleStub(channel).Classify(ClassifyRequest(images=[photo]), timeout=60)
    assert reply.results[0].classified.predictions[0].label == photo_label


def test_what_is_no_request_is_refused(client):
    answer = client.post("/v1/classify", content=b"no photo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_an_image")
    assert client.post("/v1/classify", content=bytes(21 * 2**20)).status_code == 413
    assert client.get("/v1/nothing").status_code == 404


def test_ready_page_and_metrics(client, metrics_port):
    assert client.get("/readyz").json() == {"ready": True}
    assert client.get("/v1/models").json()["model_set"] == "imagenette"
    assert (
        client.get("/", headers={"accept": "text/html"})
        .headers["content-type"]
        .startswith("text/html")
    )
    assert client.get("/page/draw.js").status_code == 200
    assert client.get("/docs").status_code == 200

    def figures() -> str:
        return httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False).text

    processes.wait_until(
        lambda: "ray_tandem_requests_total{" in figures(), processes.EVENTUALLY_S, "metrics"
    )


def test_there_is_no_haproxy_and_nobody_else_reaches_it(portable):
    titles = [processes.title(process) for process in processes.descendants(portable.process.pid)]
    assert any("ProxyActor" in each for each in titles), titles
    assert not any("haproxy" in each for each in titles), titles
    assert processes.reachable_ports(portable.process.pid) == set()
    log = portable.log.read_text()
    assert "without HAProxy (portable mode) nothing limits connections" in log
    assert "is no setting" not in log


def test_another_host_than_loopback_is_refused(start_process):
    refused = start_process("--host", "0.0.0.0")
    try:
        assert refused.process.wait(REFUSED_WITHIN_S) == 2
    finally:
        refused.stop()
    log = refused.log.read_text()
    assert "http_options.host is 0.0.0.0, and without HAProxy" in log
    assert "use --host 127.0.0.1" in log
