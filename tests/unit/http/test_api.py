"""Who may call: keys from a file or the environment, and pages of other origins."""

import hashlib
import logging
import os
from typing import Any

import pytest

from app.access import LOOK_EVERY_S, KeyFile, Keys, read_keys
from app.http.api import create_api
from app.http.body import Headers
from app.setting_values import ApiKeyError
from app.settings import Settings
from app.telemetry.metric_table import KEY_REQUESTS
from app.telemetry.metrics import meter
from tests.support.asgi_client import KEY, asgi_client, write_keys
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.hand_clock import HandClock

OTHER = "other-Key.with_all~of+the/signs=="
CLASSIFY = "/v1/classify"
SHOP, ELSEWHERE = "https://shop.example", "https://other.example"
ALLOWED = "access-control-allow-origin"


@pytest.fixture
def key_file(tmp_path):
    return write_keys(tmp_path, f"# ours\n{KEY}\n\n  {OTHER}  \n")


@pytest.fixture
def origins() -> tuple[str, ...]:
    return (SHOP, "http://localhost:3000")


@pytest.fixture
def service(key_file, origins):
    limits = {"max_body_bytes": 1000, "max_files": 3}
    return FakeService(Settings(**limits, api_keys_file=key_file, allowed_origins=origins))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_caller_with_a_key_is_let_in_and_with_two_is_not(client, key, scheme):
    header = ("authorization", f"{scheme} {key}")
    assert (await client.post(CLASSIFY, content=b"image", headers=[header])).status_code == 200
    assert (await client.get("/v1/models", headers=[header])).status_code == 200
    two = [("authorization", f"{scheme} {key}") for key in (KEY, OTHER)]
    assert (await client.get("/v1/models", headers=two)).status_code == 401


@cases(
    "value",
    *("Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}k", f"Bearer {KEY} {KEY}"),
    *(f"Basic {KEY}", KEY, f"bearer\t{KEY}", "Bearer # ours", "Bearer \xff\xfe", "x" * 10_000),
    f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}",
)
async def test_a_caller_with_another_is_not(client, service, value):
    headers = {"authorization": value.encode("latin-1")}
    answer = await client.post(CLASSIFY, content=b"image", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert KEY not in answer.text
    assert service.requests == []


async def test_without_a_key_nothing_of_the_body_is_read(client, service):
    async def body():
        raise AssertionError("the body was asked for")
        yield b""

    answer = await client.post(CLASSIFY, content=body(), headers={"x-request-id": "r1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["request_id"]) == (401, "r1")
    assert answer.headers["www-authenticate"] == 'Bearer realm="tandem"'
    assert "Authorization: Bearer KEY" in error["message"]
    assert service.requests == []


OPEN = ["/", "/page/page.js", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json"]
PROBES = ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"]
GUARDED = ["/v1/models", CLASSIFY, "//v1/models", "/nothing", "/page", "/docs/assets", "/metrics"]
GUARDED += ["/v2", "/v2/models/fake", "/v2/models/fake/ready", "/v2/models/stats"]


@cases(
    "path, status", *((path, 200) for path in [*OPEN, *PROBES]), *((path, 401) for path in GUARDED)
)
async def test_what_is_open_to_everybody_and_what_wants_a_key(client, path, status):
    """A load balancer has no key."""
    assert (await client.get(path)).status_code == status


@cases("path", "/page/../v1/models", "/docs/assets/../../v1/models", "/page//v1/models")
async def test_no_way_leads_round_the_keys(service, path):
    api = create_api(service)

    async def app(scope, receive, send):
        await api({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    async with asgi_client(app) as client:
        answer = await client.get("/")
    assert answer.status_code in (401, 404)
    assert "model_set" not in answer.text


async def test_the_description_says_what_wants_a_key(client):
    for _ in range(2):  # FastAPI keeps the description
        described = (await client.get("/openapi.json")).json()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    paths = described["paths"]
    unsecured = {p for p, ways in paths.items() if not any("security" in w for w in ways.values())}
    assert unsecured == {"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"}
    assert "401" in paths["/v1/classify"]["post"]["responses"]


async def test_a_key_is_gone_before_anybody_could_log_it(client, service, monkeypatch, caplog):
    seen: list[Any] = []
    monkeypatch.setattr(service, "served_models", lambda: 1 / 0)

    def noting(scope: Any) -> Headers:
        seen.extend(scope["headers"])
        return Headers(scope)

    monkeypatch.setattr("app.http.errors.Headers", noting)
    with caplog.at_level(logging.DEBUG):
        assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 500
    assert b"user-agent" in dict(seen)
    assert b"authorization" not in dict(seen)
    assert KEY not in caplog.text


def test_keys_come_from_the_file_and_the_environment(key_file, monkeypatch):
    assert len(read_keys(None)) == 0
    monkeypatch.setenv("TANDEM_API_KEYS", f"{'e' * 32},{'f' * 32}\n{KEY}")
    keys = read_keys(key_file)
    assert len(keys) == 4
    for key in (KEY, OTHER, "e" * 32, "f" * 32):
        assert keys.caller_of(key.encode())
    assert keys.caller_of(b"") is None
    assert KEY not in repr(vars(keys))
    monkeypatch.setenv("TANDEM_API_KEYS", "")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEYS holds no key"):
        read_keys(None)


def test_every_key_is_compared_whichever_it_is(monkeypatch):
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys([KEY, OTHER, "z" * 32])
    for key in (KEY, OTHER, "z" * 32, "nobody's"):
        compared.clear()
        keys.caller_of(key.encode())
        assert len(compared) == 3


@cases(
    "text, says",
    ("", "holds no key; openssl"),
    ("# only this\n\n", "holds no key"),
    (f"{KEY}\nsecret-but-short\n", "line 2: a key of 16 characters, the least is 24"),
    (f"# x\n{'secret with spaces ' * 3}\n", "line 2: a key is letters, digits"),
    ("sécret" * 10, "line 1: a key is letters"),
    (f"team:{'secret'}\n", "line 1: a key of 6 characters"),
    (f"secret team:{KEY}\n", "line 1: a key's name is 1 to 64 letters"),
    (f":{KEY}\n", "line 1: a key's name is"),
    (f"a:b:{KEY}\n", "line 1: a key of 1 characters"),
    (b"\xff\xfe" * 30, "is no text"),
    (None, "cannot read the keys of .*: No such file"),
)
def test_a_file_of_other_things_is_refused_without_showing_them(tmp_path, text, says):
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ApiKeyError, match=says) as refused:
        read_keys(path)
    assert str(path) in str(refused.value)
    assert "secret" not in str(refused.value)


@cases(
    "kind, mode, is_told",
    ("own", 0o600, False),
    ("own", 0o640, True),
    ("own", 0o604, True),
    ("root's", 0o440, False),
    ("root's", 0o444, True),
    ("secret", 0o440, False),
    ("secret", 0o444, True),
)
def test_a_file_that_others_may_read_is_told(key_file, monkeypatch, kind, mode, is_told, caplog):
    """A secret of Kubernetes is root's and read by the pod's group: nobody could chmod it."""
    key_file.chmod(mode)
    if kind == "root's":  # a subPath mounts the file alone
        if key_file.stat().st_uid != 0:
            pytest.skip("needs root")
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
    elif kind == "secret":  # the service may be root's too
        (key_file.parent / "..data").symlink_to("..2026")
    with caplog.at_level(logging.WARNING, "ray.serve"):
        read_keys(key_file)
    assert (f"chmod 600 {key_file}" in caplog.text) == is_told


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def replaced(path, text):
    """Put another file in its place, as mv does and a Secret's volume."""
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


@pytest.mark.parametrize("write", [replaced, lambda path, text: path.write_text(text)])
def test_a_file_that_changes_is_read_again(key_file, clock, write):
    keys = Keys(["e" * 32], KeyFile(key_file, clock))
    write(key_file, f"new:{'n' * 32}\n")
    assert keys.caller_of(KEY.encode())  # not looked at yet
    clock.now += LOOK_EVERY_S
    assert keys.caller_of(KEY.encode()) is None
    assert keys.caller_of(b"n" * 32)
    assert keys.caller_of(b"e" * 32)
    assert len(keys) == 2


def test_a_link_that_names_another_file_is_read_again(tmp_path, clock):
    """So does a Secret that is mounted change: its files do not."""
    for name, key in (("one", KEY), ("two", OTHER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(key)
    link = tmp_path / "data"
    link.symlink_to("one")
    keys = Keys([], KeyFile(link / "keys", clock))
    link.unlink()
    link.symlink_to("two")
    clock.now += LOOK_EVERY_S
    assert keys.caller_of(OTHER.encode())
    assert keys.caller_of(KEY.encode()) is None


@cases(
    "spoil, says",
    (lambda path: path.unlink(), "cannot read the keys of"),
    (lambda path: (path.unlink(), path.mkdir()), "cannot read the keys of"),
    (lambda path: path.write_text(""), "holds no key"),
    (lambda path: path.write_text("short"), "a key of 5 characters"),
    (lambda path: path.write_bytes(b"\xff" * 40), "is no text"),
)
def test_the_old_keys_hold_while_the_file_cannot_be_read(key_file, clock, caplog, spoil, says):
    keys = Keys([], KeyFile(key_file, clock))
    spoil(key_file)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for _ in range(3):  # told once, not at every look
            clock.now += LOOK_EVERY_S
            assert keys.caller_of(KEY.encode())
            assert keys.caller_of(b"short") is None
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert says in record.message
    assert "the previous keys stay valid" in record.message
    if key_file.is_dir():
        key_file.rmdir()
    replaced(key_file, OTHER)
    clock.now += LOOK_EVERY_S
    assert keys.caller_of(OTHER.encode())
    assert keys.caller_of(KEY.encode()) is None


@pytest.mark.parametrize("has_names", [True, False])
async def test_requests_are_counted_by_the_name_of_their_key(key_file, told, has_names):
    """Without names where not everybody who reads the metrics may know them."""
    meter.has_key_names = has_names
    key_file.write_text(f"team-a:{KEY}\n{OTHER}\n")
    async with asgi_client(create_api(FakeService(Settings(api_keys_file=key_file)))) as client:
        for key in (KEY, KEY, OTHER, "x" * 32, f"team-a:{KEY}"):
            await client.get("/v1/models", headers=bearer(key))
        await client.get("/v1/nothing", headers=bearer(KEY))
    results = {("team-a", "answered"): 2, ("team-a", "failed"): 1, ("unnamed", "answered"): 1}
    hidden = {("hidden", "answered"): 3, ("hidden", "failed"): 1}
    assert told.of(KEY_REQUESTS) == (results if has_names else hidden)


LIMITED = f"bob:{KEY}:rate=0.25,burst=3,lane=bulk,sets=fake|other\nann:{OTHER}"
CHANGES = ["/v1/feedback", "/v2/repository/models/infer/load", "/v2/repository/models/a/unload"]
CHANGES += [f"/v2/systemsharedmemory{way}" for way in ("/unregister", "/region/infer/register")]


async def test_a_rate_is_in_the_headers_and_beyond_it_is_429(service, clock, told):
    service.keys = Keys(LIMITED.splitlines(), clock=clock)
    async with asgi_client(create_api(service)) as client:
        answers = [
            await client.post(path, content=b"image", headers=bearer(KEY))
            for path in (CLASSIFY, "/v1/feedback", CLASSIFY, CLASSIFY)
        ]
        assert [answer.status_code for answer in answers] == [200, 403, 200, 429]
        policy = {answer.headers["ratelimit-policy"] for answer in answers}
        assert policy == {'"requests";q=3;w=12'}
        left = [answer.headers["ratelimit"] for answer in answers]
        assert left == [f'"requests";{of}' for of in ("r=2;t=4", "r=1;t=8", "r=0;t=12", "r=0;t=4")]
        refused = answers[-1]
        assert refused.headers["retry-after"] == "4"
        error = refused.json()["error"]
        assert error["code"] == "rate_limited"
        assert "the key bob may send 0.25 requests a second, and 3 at once" in error["message"]
        assert (await client.get("/healthz", headers=bearer(KEY))).status_code == 200
        other = await client.get("/v1/models", headers=bearer(OTHER))
        assert other.status_code == 200
        assert "ratelimit" not in other.headers
        figures = (await client.get("/v1/keys", headers=bearer(OTHER))).json()
        clock.now += 4
        assert (await client.get("/v1/keys", headers=bearer(KEY))).status_code == 403
    assert figures["ann"] == {"answered": 1, "refused": 0, "failed": 0, "images": 0, "cpu_ms": 0}
    assert figures["bob"] == figures["ann"] | {"answered": 2, "refused": 2}


async def test_a_key_without_admin_changes_nothing(service):
    service.keys = Keys([f"bob:{KEY}:admin=no", f"ann:{OTHER}:share=2,admin"])
    async with asgi_client(create_api(service)) as client:
        for method, path in (("PUT", "/v1/traffic"), *(("POST", path) for path in CHANGES)):
            answer = await client.request(method, path, headers=bearer(KEY))
            assert (answer.status_code, "option admin" in answer.text) == (403, True), path
            answer = await client.request(method, path, headers=bearer(OTHER))
            assert "option admin" not in answer.text, path
        for path in ("/v2/repository/index", CLASSIFY):
            answer = await client.post(path, content=b"", headers=bearer(KEY))
            assert answer.status_code != 403, path


@cases(
    "headers, more, name",
    ({}, {}, "192.0.2.5"),  # without HAProxy in front
    ({"x-tandem-address": "198.51.100.1"}, {}, "198.51.100.1"),
    ({"x-forwarded-for": "198.51.100.1"}, {}, "192.0.2.5"),
    ({"x-forwarded-for": "198.51.100.1"}, {"trusted_proxies": ["192.0.2.0/24"]}, "198.51.100.1"),
)
async def test_without_keys_the_graph_knows_callers_by_address(behind_haproxy, headers, more, name):
    service = FakeService(Settings(**more))
    async with asgi_client(create_api(service), client=("192.0.2.5", 1)) as client:
        assert (await client.post(CLASSIFY, content=b"image", headers=headers)).status_code == 200
    assert service.requests[0].caller.name == name


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    asked = {"method": method, "headers": "authorization,content-type,x-request-timeout-seconds"}
    return {"origin": origin} | {f"access-control-request-{k}": v for k, v in asked.items()}


@pytest.mark.parametrize("path", ["/v1/classify", "/v1/models", "/v2/models/a/infer"])
@pytest.mark.parametrize("origin", [SHOP, "http://localhost:3000"])
async def test_a_preflight_is_answered_without_a_key(client, path, origin):
    answer = await client.options(path, headers=preflight(origin))
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, origin)
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"]
    assert allowed == preflight(origin)["access-control-request-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("origin", "method"),
    [(ELSEWHERE, "POST"), (SHOP + ".evil", "POST"), ("null", "POST"), (SHOP, "DELETE")],
)
async def test_another_preflight_is_refused_and_says_why(client, origin, method):
    headers = preflight(origin, method) | {"x-request-id": "r1"}
    answer = await client.options("/v1/classify", headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["request_id"]) == (400, "origin", "r1")
    for word in (origin, method, "allowed_origins"):
        assert word in error["message"]
    assert answer.headers.get(ALLOWED) == (origin if origin == SHOP else None)
    assert answer.headers["content-type"] == "application/json"


async def test_every_answer_can_be_read_by_an_allowed_page(client, service):
    key = bearer(KEY) | {"origin": SHOP}
    image = {"content": b"image", "headers": key}
    seen = [
        await client.post(CLASSIFY, **image),
        await client.post(CLASSIFY, content=b"image", headers={"origin": SHOP}),
        await client.post(f"{CLASSIFY}?top_k=x", **image),
        *[await client.get(path, headers=key) for path in ("/nothing", "/v2/models/nothing", "/")],
    ]
    service.raises = RuntimeError("a bug")
    seen.append(await client.post(CLASSIFY, **image))
    assert [answer.status_code for answer in seen] == [200, 401, 422, 404, 404, 200, 500]
    assert {answer.headers.get(ALLOWED) for answer in seen} == {SHOP}
    page = ["Accept, User-Agent, Origin"]
    assert [answer.headers.get("vary") for answer in seen] == [*["Origin"] * 5, *page, "Origin"]
    exposed = {answer.headers["access-control-expose-headers"] for answer in seen}
    assert all("x-request-id" in names and "retry-after" in names for names in exposed)


@pytest.mark.parametrize("headers", [{"origin": ELSEWHERE}, {}])
async def test_other_pages_read_nothing(client, headers):
    answer = await client.post("/v1/classify", content=b"image", headers=bearer(KEY) | headers)
    assert answer.status_code == 200  # curl and the like have no origin, and need none
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize("origins", [("*",)])
async def test_all_origins(client, origins):
    asked = await client.options("/v1/classify", headers=preflight(ELSEWHERE))
    answer = await client.post("/v1/classify", content=b"image", headers={"origin": ELSEWHERE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (401, "*")
    assert asked.headers[ALLOWED] == "*"


async def test_without_settings_everybody_may_call_and_no_page():
    async with asgi_client(create_api(FakeService())) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert "securitySchemes" not in (await client.get("/openapi.json")).text
        refused = await client.options("/v1/classify", headers=preflight(SHOP))
        answer = await client.post("/v1/classify", content=b"image", headers={"origin": SHOP})
    assert (refused.status_code, answer.status_code) == (405, 200)
    names = {*refused.headers, *answer.headers}
    assert not [name for name in names if name.startswith("access-control")]


def test_origins_as_browsers_write_them():
    unusual = ("http://[::1]:3000", "tauri://localhost", "http://a_b-c.d:65535")
    origins = ("https://shop.example", *unusual, "*")
    assert Settings(allowed_origins=origins).allowed_origins == origins


@cases(
    "text",
    *("shop.example", "https://shop.example/", "https://Shop.example", "https://*.example"),
    *("https://shop.example:443", "http://shop.example:80", "https://shop.example }"),
    *("https://", "null", ""),
)
def test_what_no_browser_writes_is_refused_before_anything_starts(text):
    with pytest.raises(ValueError, match="is no origin: give scheme, host and port"):
        Settings(allowed_origins=("*", text))
