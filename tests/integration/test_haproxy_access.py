"""The real HAProxy with TLS before the HTTP interface with keys: who gets in, with what.

The whole service with both, and gRPC's: tests/e2e/test_access.py.
"""

import json
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.certificates import Root, Signed
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_process import OPTIONS
from tests.support.services.live_service import TANDEM
from tests.support.services.processes import EVENTUALLY_S, wait_until

KEY = "integration-key.0123456789abcdef"
OTHER = "of-the-environment-0123456789"
PHOTO = b"image"  # for the fake service


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root: Root) -> Signed:
    return root.sign("service")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# of the test\n{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def port(
    root: Root,
    signed: Signed,
    key_file: Path,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[int]:
    """Return HAProxy's port; one key is in a file, the other in the environment."""
    files = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    http = HttpOptions(host="127.0.0.1", port=free_port(), **files)
    folder, own = tmp_path_factory.mktemp("run"), (free_port(), free_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_API_KEYS", OTHER)
        service = FakeService(Settings(max_body_bytes=1000, api_keys_file=key_file))

    def answers() -> bool:
        with suppress(httpx.HTTPError), trusting_at(http.port, root) as client:
            return client.get("/healthz").is_success
        return False

    with gateway_of(service) as gateway, haproxy_of(http, gateway, folder, own, OPTIONS):
        wait_until(answers, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield http.port


def trusting_at(port: int, root: Root) -> httpx.Client:
    """Return a client that knows the root, and verifies."""
    context = ssl.create_default_context(cafile=root.path)
    url = f"https://127.0.0.1:{port}"
    return httpx.Client(base_url=url, verify=context, timeout=60, trust_env=False)


@pytest.fixture
def client(port: int, root: Root) -> Iterator[httpx.Client]:
    with trusting_at(port, root) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_key_over_tls_gets_an_answer(client: httpx.Client, key: str) -> None:
    answer = client.post("/v1/classify", content=PHOTO, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0]["label"] == PHOTO.decode()


@pytest.mark.parametrize("headers", [{}, bearer(KEY[:-1]), {"authorization": f"Basic {KEY}"}])
def test_without_one_of_the_keys_nothing(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.post("/v1/classify", content=PHOTO, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["code"] == "unauthorized"
    assert client.get("/v1/models", headers=headers).status_code == 401
    for path in ("/healthz", "/readyz", "/", "/docs"):
        assert client.get(path).status_code == 200


def test_a_large_body_without_a_key_is_refused_and_not_kept(client: httpx.Client) -> None:
    answer = client.post("/v1/classify", content=bytes(19 * 10**6))
    assert answer.status_code == 401


def test_the_certificate_is_the_given_one_and_nothing_goes_in_clear(
    port: int, signed: Signed
) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{port}/healthz", trust_env=False)
    served = ssl.get_server_certificate(("127.0.0.1", port))
    assert served.split() == signed.certificate.read_text().split()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)


def test_old_tls_is_refused(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain)


@pytest.mark.parametrize("has_key", [True, False])
def test_the_command_line_sends_a_key(
    port: int, root: Root, key_file: Path, tmp_path: Path, has_key: bool
) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    key = ["--key-file", str(key_file)] if has_key else []
    url = f"https://127.0.0.1:{port}"
    done = subprocess.run(
        [TANDEM, "classify", "--json", "--url", url, *key, str(tmp_path / "photo.jpg")],
        env=os.environ | {"SSL_CERT_FILE": str(root.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == has_key, said
    assert KEY not in said
    if has_key:
        assert json.loads(done.stdout)["predictions"][0]["label"] == PHOTO.decode()
    else:
        assert "requires an API key" in said
