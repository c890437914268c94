"""Pages of other origins: which may call from a browser, and that they can read every answer."""

import httpx
import pytest

from app.http.api import create_api
from app.settings import Settings
from tests.support.fakes import FakeService

SHOP, OTHER, KEY = "https://shop.example", "https://other.example", "k" * 32
ALLOWED = "access-control-allow-origin"


@pytest.fixture
def origins() -> tuple[str, ...]:
    return (SHOP, "http://localhost:3000")


@pytest.fixture
def service(origins, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    return FakeService(Settings(allowed_origins=origins, api_keys_file=keys))


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    wanted = "authorization,content-type,x-request-timeout-seconds"
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": wanted,
    }


@pytest.mark.parametrize("path", ["/v1/classify", "/v1/models", "/v2/models/a/infer"])
@pytest.mark.parametrize("origin", [SHOP, "http://localhost:3000"])
async def test_a_preflight_is_answered_without_a_key(client, path, origin):
    answer = await client.options(path, headers=preflight(origin))
    assert answer.status_code == 200
    assert answer.headers[ALLOWED] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"]
    assert allowed == preflight(origin)["access-control-request-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("origin", "method"),
    [(OTHER, "POST"), (SHOP + ".evil", "POST"), ("null", "POST"), (SHOP, "DELETE")],
)
async def test_another_preflight_is_refused_and_says_why(client, origin, method):
    answer = await client.options("/v1/classify", headers=preflight(origin, method))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "origin")
    assert origin in error["message"]
    assert method in error["message"]
    assert "allowed_origins" in error["message"]
    assert answer.headers.get(ALLOWED) == (origin if origin == SHOP else None)
    assert answer.headers["content-type"] == "application/json"


async def test_a_refused_preflight_has_the_requests_own_id(client):
    answer = await client.options("/v1/models", headers=preflight(OTHER) | {"x-request-id": "r1"})
    assert answer.json()["error"]["request_id"] == "r1"


async def test_every_answer_can_be_read_by_an_allowed_page(client, service):
    key = {"authorization": f"Bearer {KEY}", "origin": SHOP}
    seen = [
        await client.post("/v1/classify", content=b"image", headers=key),
        await client.post("/v1/classify", content=b"image", headers={"origin": SHOP}),
        await client.post("/v1/classify?top_k=x", content=b"image", headers=key),
        await client.get("/nothing", headers=key),
        await client.get("/v2/models/nothing", headers=key),
        await client.get("/", headers=key),
    ]
    service.raises = RuntimeError("a bug")
    seen.append(await client.post("/v1/classify", content=b"image", headers=key))
    assert [answer.status_code for answer in seen] == [200, 401, 422, 404, 404, 200, 500]
    assert {answer.headers.get(ALLOWED) for answer in seen} == {SHOP}
    assert {answer.headers.get("vary") for answer in seen} == {"Origin"}
    exposed = {answer.headers["access-control-expose-headers"] for answer in seen}
    assert all("x-request-id" in names and "retry-after" in names for names in exposed)


@pytest.mark.parametrize("headers", [{"origin": OTHER}, {}])
async def test_other_pages_read_nothing(client, headers):
    key = {"authorization": f"Bearer {KEY}"}
    answer = await client.post("/v1/classify", content=b"image", headers=key | headers)
    assert answer.status_code == 200  # curl and the like have no origin, and need none
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize("origins", [("*",)])
async def test_all_origins(client, origins):
    assert (await client.options("/v1/classify", headers=preflight(OTHER))).headers[ALLOWED] == "*"
    answer = await client.post("/v1/classify", content=b"image", headers={"origin": OTHER})
    assert (answer.status_code, answer.headers[ALLOWED]) == (401, "*")


async def test_without_the_setting_nobody_is_allowed():
    transport = httpx.ASGITransport(create_api(FakeService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        refused = await client.options("/v1/classify", headers=preflight(SHOP))
        answer = await client.post("/v1/classify", content=b"image", headers={"origin": SHOP})
    assert (refused.status_code, answer.status_code) == (405, 200)
    names = {*refused.headers, *answer.headers}
    assert not [name for name in names if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["https://shop.example", "http://[::1]:3000", "tauri://localhost", "http://a_b-c.d:65535", "*"],
)
def test_origins_as_browsers_write_them(origin):
    assert Settings(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "text",
    [
        "shop.example",
        "https://shop.example/",
        "https://Shop.example",
        "https://*.example",
        "https://shop.example:443",
        "http://shop.example:80",
        "https://shop.example }",
        "https://",
        "null",
        "",
    ],
)
def test_what_no_browser_writes_is_refused_before_anything_starts(text):
    with pytest.raises(ValueError, match="is no origin: give scheme, host and port"):
        Settings(allowed_origins=("*", text))
