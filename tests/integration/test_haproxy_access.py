"""The real HAProxy with TLS before the HTTP interface with keys: who gets in, with what.

The whole service with both, and gRPC's: tests/e2e/test_access.py.
"""

import json
import socket
import ssl
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app.access import read_keys
from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.cases import cases
from tests.support.certificates import Root, Signed
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of, num_asked
from tests.support.haproxy_process import OPTIONS, ORIGIN
from tests.support.services.live_service import run_tandem
from tests.support.services.processes import EVENTUALLY_S, wait_until

KEY = "integration-key.0123456789abcdef"
OTHER = "of-the-environment-0123456789"
SLOW = "of-a-slow-caller-0123456789"
PHOTO = b"image"  # for the fake service


class Front(NamedTuple):
    """HAProxy with TLS; one key is in a file, the other in the environment."""

    port: int
    root: Root
    signed: Signed
    key_file: Path
    folder: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        """Return a client that knows the root, and verifies."""
        context = ssl.create_default_context(cafile=self.root.path)
        return httpx.Client(base_url=self.url, verify=context, timeout=60, trust_env=False)

    def is_up(self) -> bool:
        with suppress(httpx.HTTPError), self.client() as client:
            return client.get("/healthz").is_success
        return False


@pytest.fixture(scope="module")
def front(free_port, tmp_path_factory):
    root = Root(tmp_path_factory.mktemp("certificates"))
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text(f"# of the test\n{KEY}\n")
    key_file.chmod(0o600)
    folder, own = tmp_path_factory.mktemp("run"), (free_port(), free_port())
    front = Front(free_port(), root, root.sign("service"), key_file, folder)
    files = {"ssl_certfile": str(front.signed.certificate), "ssl_keyfile": str(front.signed.key)}
    http = HttpOptions(host="127.0.0.1", port=front.port, **files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_API_KEYS", f"{OTHER},bob:{SLOW}:rate=0.01,burst=2,sets=fake")
        settings = Settings(max_body_bytes=1000, api_keys_file=key_file, allowed_origins=(ORIGIN,))
        service = FakeService(settings)
        keys = read_keys(key_file)
    with gateway_of(service) as gateway, haproxy_of(http, gateway, folder, own, OPTIONS, keys):
        wait_until(front.is_up, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield front


@pytest.fixture
def client(front):
    with front.client() as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_key_over_tls_gets_an_answer(client, key):
    answer = client.post("/v1/classify", content=PHOTO, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0]["label"] == PHOTO.decode()


def test_a_rate_and_its_headers_reach_the_client(client, front):
    url, options = "/v1/classify", {"content": PHOTO, "headers": bearer(SLOW)}
    answers = [client.post(url, **options) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert {a.headers["ratelimit-policy"] for a in answers} == {'"requests";q=2;w=200'}
    assert int(answers[2].headers["retry-after"]) in range(50, 101)
    message = answers[2].json()["error"]["message"]
    assert message.startswith("the key bob may send 0.01 requests a second, and 2 at once")
    assert client.post(url, content=PHOTO, headers=bearer(KEY)).status_code == 200
    arguments = ("keys", "--url", front.url, "--ca", str(front.root.path), "--json")
    used = run_tandem(*arguments, "--key-file", str(front.key_file))
    assert json.loads(used.stdout)["bob"]["refused"] == 1


@cases(
    "content, headers",
    (PHOTO, {}),
    (PHOTO, bearer(KEY[:-1])),
    (PHOTO, {"authorization": f"Basic {KEY}"}),
    (bytes(19 * 10**6), {}),  # nor is a large body kept
    ids=["none", "another", "not a bearer's", "none, for 19 MB"],
)
def test_without_one_of_the_keys_nothing(client, content, headers):
    answer = client.post("/v1/classify", content=content, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["code"] == "unauthorized"
    assert client.get("/v1/models", headers=headers).status_code == 401
    for path in ("/healthz", "/readyz", "/", "/docs"):
        assert client.get(path).status_code == 200


def test_the_certificate_is_the_services_and_nothing_goes_in_clear(front):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{front.url}/healthz", trust_env=False)
    served = ssl.get_server_certificate(("127.0.0.1", front.port))
    assert served.split() == front.signed.certificate.read_text().split()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{front.port}/healthz", trust_env=False)


def test_old_tls_is_refused(front):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", front.port), 10) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain)


@pytest.mark.parametrize("has_key", [True, False])
def test_the_command_line_sends_a_key(front, tmp_path, has_key):
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    key = ["--key-file", front.key_file] if has_key else []
    asked = ("classify", "--json", "--url", front.url, *key, tmp_path / "photo.jpg")
    done = run_tandem(*asked, exit_code=None, SSL_CERT_FILE=str(front.root.path))
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == has_key, said
    assert KEY not in said
    if has_key:
        assert json.loads(done.stdout)["predictions"][0]["label"] == PHOTO.decode()
    else:
        assert "requires an API key" in said


@cases(
    "sent, said, problem",
    ((), "requires an API key", ""),
    ((OTHER[:-1],), "none of this service's keys", ', error="invalid_token"'),
    ((KEY, OTHER), "send one header", ', error="invalid_token"'),
)
@pytest.mark.parametrize("path", ["/v1/classify", "/v2/models/x/infer", "/healthzz"])
def test_haproxy_itself_refuses_and_in_the_services_form(client, front, path, sent, said, problem):
    headers = [("authorization", f"Bearer {key}") for key in sent]
    before = num_asked(front.folder)
    answer = client.post(path, content=PHOTO, headers=[*headers, ("origin", ORIGIN)])
    assert num_asked(front.folder) == before
    error, request_id = answer.json()["error"], answer.headers["x-request-id"]
    assert path.startswith("/v2") or error["request_id"] == request_id != ""
    assert said in (error if path.startswith("/v2") else error["message"])
    assert answer.headers["www-authenticate"] == f'Bearer realm="tandem"{problem}'
    assert answer.headers["access-control-allow-origin"] == ORIGIN


@cases("spelling", "bearer {}", "BEARER {}", "Bearer   {}")
def test_haproxy_lets_in_what_the_gateway_does(client, spelling):
    headers = {"authorization": spelling.format(KEY)}
    assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_page_asks_beforehand_without_a_key(client):
    asks = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert client.options("/v1/classify", headers=asks).status_code == 200


def test_haproxy_follows_the_key_file(client, front):
    new, before = "another-key.0123456789abcdef", front.key_file.read_text()
    front.key_file.write_text(f"{new}\n")

    def status(key: str) -> int:
        return client.get("/v1/models", headers=bearer(key)).status_code

    wait_until(lambda: status(new) == 200, EVENTUALLY_S, "the new key is accepted")
    wait_until(lambda: status(KEY) == 401, EVENTUALLY_S, "the old one is not")
    assert status(OTHER) == 200
    front.key_file.write_text(before)
    wait_until(lambda: status(KEY) == 200, EVENTUALLY_S, "the old one is accepted again")


def test_what_haproxy_keeps_of_keys_is_hashes_for_this_user(front):
    map_file = front.folder / "keys.map"
    assert map_file.stat().st_mode & 0o777 == 0o600
    assert sha256(KEY.encode()).hexdigest().upper() in map_file.read_text()
    texts = [path.read_text() for path in front.folder.iterdir() if path.is_file()]
    assert not any(key in text for text in texts for key in (KEY, OTHER))
