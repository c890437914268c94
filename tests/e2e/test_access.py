"""A service with keys and TLS: who gets in, with what, and where a key is never seen.

``make test`` has HAProxy with TLS before the interface with keys, without Ray, in
tests/integration/test_haproxy_access.py.
"""

import base64
import signal
import ssl
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from playwright.sync_api import expect

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.http_server import QuietRequest, ThreadedServer
from tests.support.reflection_v1 import reflection_v1
from tests.support.services import processes
from tests.support.services.page_driver import drop, watched
from tests.support.services.stopping import lent

pytestmark = pytest.mark.slow
NUM_LARGE, LARGE = 24, ClassifyRequest(images=[bytes(18 * 2**20)])
NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
ANY_ROOT = grpc.ssl_channel_credentials()  # of the public ones
KEY = "e2e-key.0123456789abcdefghij"
OTHER = "of-the-environment-0123456789"
SHOP_PAGE = b"""<!doctype html><meta charset=utf-8><link rel=icon href=data:,>
<title>A shop</title><h1>A shop</h1><pre id=out></pre>"""
ASK = """async ([url, method, key, photo, more]) => {
    const body = photo && Uint8Array.from(atob(photo), (c) => c.charCodeAt(0));
    const headers = { authorization: `Bearer ${key}`, "x-request-timeout-seconds": "60", ...more };
    const row = await fetch(url, { method, headers, body }).then(
        async (answer) => [answer.status, answer.headers.get("x-request-id"), await answer.json()],
        (error) => [String(error)]);
    out.textContent += `${method} ${url}\\n  ${JSON.stringify(row).slice(0, 150)}\\n`;
    return row;
}"""
NEW = "new-e2e-key.0123456789abcdef"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# of the test\n{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def shop():
    """Another site; by the names 127.0.0.1 and localhost it is two origins for a browser."""

    class Page(QuietRequest):
        def do_GET(self) -> None:
            self.send(200, SHOP_PAGE, content_type="text/html")

    with ThreadedServer(Page) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(start_process, shop, signed, key_file, grpc_port):
    """Start a service that has both; one key is in the file, the other in the environment."""
    tls = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    options = ("--api-keys-file", str(key_file), "--grpc-port", str(grpc_port))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_API_KEYS", OTHER)
        started = start_process(*options, http=tls, args={"allowed_origins": [shop.url]})
    with lent(started, signal.SIGTERM, is_for_all=False) as service:
        yield service


@pytest.fixture(scope="module")
def url(guarded) -> str:
    return guarded.url.replace("http:", "https:")


@pytest.fixture(scope="module")
def service_url(url) -> str:
    """The address that pages are opened at."""
    return url


@pytest.fixture
def trusting(url, root):
    """A client that knows the root, and verifies."""
    context = ssl.create_default_context(cafile=root.path)
    with httpx.Client(base_url=url, verify=context, timeout=60) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_grpc_has_the_same_keys_and_tls(guarded, grpc_port, root, photo, photo_label):
    request, where = ClassifyRequest(images=[photo]), f"127.0.0.1:{grpc_port}"
    trusted = grpc.ssl_channel_credentials(root.path.read_bytes())
    with grpc.secure_channel(where, trusted) as channel:
        ensemble = EnsembleStub(channel)
        reply = ensemble.Classify(request, timeout=60, metadata=[*bearer(KEY).items()])
        assert reply.results[0].classified.predictions[0].label == photo_label
        for headers in ({}, bearer(KEY[:-1])):
            with pytest.raises(grpc.RpcError) as refused:
                ensemble.Classify(request, timeout=60, metadata=[*headers.items()])
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        described = DescriptorPool(reflection_v1(channel))  # as grpcurl asks, without a key
        for name in ("tandem.v1.Ensemble", "grpc.reflection.v1.ServerReflection"):
            assert described.FindServiceByName(name).full_name == name
        health = HealthStub(channel)  # a probe has no key
        asked = [HealthCheckRequest(service=name) for name in ("", "tandem.v1.Ensemble", "other")]
        for probe in asked[:2]:
            assert health.Check(probe, timeout=60).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            health.Check(asked[2], timeout=60)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as refused:
            list(health.Watch(asked[0], timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # then clients take it as well
    for wrong in (grpc.insecure_channel(where), grpc.secure_channel(where, ANY_ROOT)):
        with wrong as channel, pytest.raises(grpc.RpcError) as refused:
            EnsembleStub(channel).Classify(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def called(where, root, request, key="", **options):
    """Return a call's status and error code, on a connection of its own."""
    trusted = grpc.ssl_channel_credentials(root.path.read_bytes())
    metadata = [*bearer(key).items()] if key else []
    with grpc.secure_channel(where, trusted, options=NO_LIMIT) as channel:
        try:
            EnsembleStub(channel).Classify(request, metadata=metadata, timeout=60, **options)
        except grpc.RpcError as error:
            return error.code(), str(dict(error.trailing_metadata()).get("error-code"))
    return grpc.StatusCode.OK, ""


def test_large_messages_without_a_key_take_no_memory(guarded, grpc_port, root, photo):
    """In the fast tier: the Gateway's part in tests/unit/grpc/test_receiver.py."""
    gateway = psutil.Process(processes.replicas(guarded.process.pid)["Gateway"])
    where = f"127.0.0.1:{grpc_port}"
    called(where, root, ClassifyRequest(images=[photo]), KEY)
    before = most = gateway.memory_info().rss
    with ThreadPoolExecutor(NUM_LARGE) as pool:
        calls = [pool.submit(called, where, root, LARGE) for _ in range(NUM_LARGE)]
        while not all(call.done() for call in calls):
            most = max(most, gateway.memory_info().rss)
            time.sleep(0.02)  # a sample, not a wait
    ends = Counter(call.result() for call in calls)
    assert ends == {(grpc.StatusCode.UNAUTHENTICATED, "unauthorized"): NUM_LARGE}
    assert most - before < 4 * len(LARGE.images[0])  # of 24


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_large_messages_with_a_key_are_answered(guarded, grpc_port, root, compression):
    """No more of them at a time than there is room for; what is no image is no call's error."""
    end = called(f"127.0.0.1:{grpc_port}", root, LARGE, KEY, compression=compression)
    assert end == (grpc.StatusCode.OK, "")


def test_the_command_says_how_to_call_it(guarded, url):
    said = guarded.log.read_text()
    assert f"ready at {url}" in said
    assert 'curl -H "Authorization: Bearer $TANDEM_API_KEY"' in said


def test_a_key_is_in_no_log_and_no_command_line(guarded, trusting, photo):
    for key, status in ((KEY, 200), (OTHER, 200), (KEY + "x", 401)):
        answer = trusting.post("/v1/classify", content=photo, headers=bearer(key))
        assert answer.status_code == status
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert KEY not in guarded.log.read_text()
    logs = [p for p in processes.serve_logs(guarded.process.pid).parent.rglob("*") if p.is_file()]
    assert any("Gateway" in path.name for path in logs)
    for path in logs:
        text = path.read_bytes()
        assert KEY.encode() not in text, path
        assert OTHER.encode() not in text, path
    for process in processes.descendants(guarded.process.pid):
        assert KEY not in processes.title(process)
        assert OTHER not in processes.title(process)


def test_nothing_listens_beyond_loopback(guarded):
    assert processes.reachable_ports(guarded.process.pid) == set()


@pytest.mark.browser
def test_the_page_asks_for_a_key_and_keeps_it(browser, url, photo_file, photo_label):
    with watched(browser, url, ("/v1/models", "/v1/classify"), ignore_https_errors=True) as page:
        page.goto(f"{url}/")
        field = page.get_by_label("Key", exact=True)
        expect(field).to_be_focused()
        expect(page.get_by_role("alert")).to_contain_text("requires an API key")
        field.fill("not-one-of-the-services-keys")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("none of this service's keys")
        field.fill(KEY)
        page.get_by_role("button", name="Use it").click()
        expect(field).to_be_hidden()
        expect(page.locator("#labels li").first).to_be_visible()
        drop(page, photo_file)
        expect(page.locator("#headline")).to_have_text(photo_label)
        page.reload()
        expect(page.locator("#labels li").first).to_be_visible()
        expect(field).to_be_hidden()


@pytest.mark.browser
def test_a_page_of_another_site_calls_if_it_is_allowed(
    browser, url, shop, photo, photo_label, tmp_path
):
    """It sends a key and a time limit, so that the browser asks first, and reads what it gets."""
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    classify, picture = f"{url}/v1/classify", base64.b64encode(photo).decode()
    page.goto(shop.url)
    status, request_id, answer = page.evaluate(ASK, [classify, "POST", KEY, picture])
    assert (status, answer["predictions"][0]["label"]) == (200, photo_label)
    assert request_id == answer["request_id"]
    refused = [
        page.evaluate(ASK, [classify, "POST", f"{KEY}x", picture]),
        page.evaluate(ASK, [classify, "POST", KEY, base64.b64encode(b"no image").decode()]),
        # HAProxy's own answer to 15 KB of headers: the preflight before it has their names alone.
        page.evaluate(ASK, [classify, "POST", KEY, None, {"x-long": "x" * 15_400}]),
    ]
    codes = [(row[0], row[2]["error"]["code"]) for row in refused]
    assert codes == [(401, "unauthorized"), (400, "not_an_image"), (400, "bad_request")]
    page.screenshot(path=tmp_path / "allowed.png")

    page.goto(shop.url.replace("127.0.0.1", "localhost"))
    (error,) = page.evaluate(ASK, [classify, "POST", KEY, picture])
    assert error == "TypeError: Failed to fetch"
    page.screenshot(path=tmp_path / "refused.png")
    context.close()


def test_keys_and_certificate_are_renewed_while_it_serves(
    guarded, url, root, signed, key_file, trusting
):
    def status(key: str) -> int:
        return trusting.get("/v1/models", headers=bearer(key)).status_code

    with pytest.raises(httpx.RemoteProtocolError):  # nothing goes in clear
        httpx.get(f"{guarded.url}/healthz")
    key_file.unlink()  # then the old one holds
    key_file.write_text(f"team-a:{NEW}\n{KEY}\n")
    processes.wait_until(
        lambda: status(NEW) == 200, processes.EVENTUALLY_S, "the new key is not taken"
    )
    assert status(KEY) == status(OTHER) == 200
    key_file.write_text(f"{KEY}\n")
    processes.wait_until(
        lambda: status(NEW) == 401, processes.EVENTUALLY_S, "the key that went is still taken"
    )
    before = signed.certificate.read_text()
    root.sign(signed.certificate.stem)

    def is_renewed() -> bool:
        served = ssl.get_server_certificate(("127.0.0.1", guarded.port))
        return served.split() == signed.certificate.read_text().split()

    processes.wait_until(is_renewed, processes.EVENTUALLY_S, "the renewed certificate is not shown")
    assert before != signed.certificate.read_text()
    with httpx.Client(verify=ssl.create_default_context(cafile=root.path)) as client:
        assert client.get(f"{url}/readyz").status_code == 200
