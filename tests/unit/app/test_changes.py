"""Requests in one form, and the table of the routes that change something, which is walked here."""

import grpc
import httpx
import pytest
from starlette.routing import Route

from app.changes import CHANGES, MEMORY, OIP, ROUTES
from app.environment import HA_PROXY, HAPROXY_SECRET
from app.errors import REFUSED_HEADER, SECRET_HEADER
from app.graph.request import NormalForm
from app.grpc.call import OPEN_INFERENCE, GrpcCall, add_servicer, normal_form
from app.grpc.open_inference import OpenInferenceInterface
from app.http.api import create_api
from app.oip.inference import Inference
from app.settings import Settings
from tests.support.asgi_client import KEY, write_keys
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.grpc_contexts import context_of, stream_of

HERE, PAGE = "127.0.0.1", "https://shop.example"
OWN = [
    {},
    {"host": "localhost:8000"},
    {"host": "[::1]"},
    {"host": "a.localhost:9", "origin": "http://a.localhost:9"},  # a page of the service's own
    {"sec-fetch-site": "same-origin"},
    {"x-real-ip": "::1", "x-forwarded-for": "127.0.0.1"},
]
FOREIGN = [
    {"origin": PAGE},
    {"origin": "null"},
    {"origin": "http://evil.example:8000", "host": "evil.example:8000"},  # names this address
    {"host": "evil.example"},
    {"host": "evillocalhost"},
    {"x-forwarded-for": "127.0.0.1, 203.0.113.5"},
    {"forwarded": "for=203.0.113.5"},
    {"x-real-ip": "203.0.113.5"},
    {"via": "1.1 proxy"},
    {"x-forwarded-host": "shop.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},  # another port's
]
OVER_HTTP = [route for route in CHANGES if not route.startswith(OIP)]
OVER_GRPC = [route.partition(" ")[2] for route in CHANGES if route.startswith(OIP)]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    monkeypatch.setenv("TANDEM_ON_LOOPBACK", "1")
    monkeypatch.delenv("TANDEM_API_KEYS", raising=False)


def api_of(**settings):
    return create_api(FakeService(Settings(**settings)))


async def status_of(api, route, headers, address=HERE):
    """Return the status; what is off, or has no such name, is another than 403."""
    verb, path = route.split(" ")
    transport = httpx.ASGITransport(api, client=(address, 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        sent = {"content-type": "text/plain", **headers}
        return (await client.request(verb, path, headers=sent, content=b"{}")).status_code


def test_every_route_and_method_is_in_the_table():
    """Serve's own methods, and reflection, change nothing; they are not ours."""
    api, handlers = create_api(FakeService()), []

    class Server:
        def add_generic_rpc_handlers(self, added):
            handlers.extend(added)

    class Servicer:
        def __getattr__(self, name):
            return name

    add_servicer(Servicer(), Server())
    of_grpc = {
        name.strip("/").replace("/", " ") for each in handlers for name in each._method_handlers
    }
    routes = [route for route in api.routes if isinstance(route, Route)]
    assert len(routes) == len(api.routes)
    of_http = {f"{verb} {route.path}" for route in routes for verb in route.methods or ()}
    assert of_http | of_grpc == ROUTES.keys()
    assert not [r for r in ROUTES if ROUTES[r] is None and r.split()[0] in ("PUT", "DELETE")]


@pytest.mark.parametrize("route", OVER_HTTP)
async def test_who_changes_something_on_loopback_without_keys(route):
    api = api_of()
    for headers in OWN:
        assert await status_of(api, route, headers) != 403, headers
    for headers in FOREIGN:
        assert await status_of(api, route, headers) == 403, headers
    assert await status_of(api, route, {}, address="203.0.113.5") == 403
    # allowed_origins may classify and tell what was right, no more.
    allowed = await status_of(api_of(allowed_origins=(PAGE,)), route, {"origin": PAGE})
    assert (allowed == 403) is (not CHANGES[route].pages)


@pytest.mark.parametrize("route", OVER_HTTP)
async def test_with_keys_the_key_decides_but_for_shared_memory(route, tmp_path):
    api, mine = api_of(api_keys_file=write_keys(tmp_path)), {"authorization": f"Bearer {KEY}"}
    for headers in FOREIGN:
        assert await status_of(api, route, headers) == 401
        status = await status_of(api, route, headers | mine)
        assert (status == 403) is (CHANGES[route] is MEMORY), headers


async def test_on_a_network_without_keys_no_page_of_another_site_gives_feedback(monkeypatch):
    monkeypatch.delenv("TANDEM_ON_LOOPBACK")
    address, host, api = "203.0.113.5", {"host": "tandem.example"}, api_of()
    assert await status_of(api, "POST /v1/feedback", host, address) == 404  # it is off
    assert await status_of(api, "POST /v1/feedback", host | {"origin": PAGE}, address) == 403


async def test_reading_asks_for_nothing():
    api = api_of()
    for headers in FOREIGN:
        assert await status_of(api, "GET /v1/models", headers) != 403


@pytest.mark.parametrize("method", OVER_GRPC)
@cases(
    "peer, metadata, is_refused",
    (f"ipv4:{HERE}:9", {}, False),
    ("ipv4:203.0.113.5:9", {}, True),
    (f"ipv4:{HERE}:9", {"origin": PAGE}, True),
    (f"ipv4:{HERE}:9", {"x_forwarded_for": "203.0.113.5"}, True),
)
async def test_the_same_holds_over_grpc(method, peer, metadata, is_refused):
    context = context_of(peer=peer, **metadata)
    interface = OpenInferenceInterface(Inference(FakeService()))
    await interface.call(method, stream_of(b""), context)
    assert (context.code() is grpc.StatusCode.PERMISSION_DENIED) is is_refused


FORGED = (REFUSED_HEADER, "9")


@cases(
    "haproxy, secret, sent, is_believed",
    ("0", "s", [(SECRET_HEADER, "s")], False),  # portable: nobody removes a client's
    ("1", "s", [], False),
    ("1", "s", [(SECRET_HEADER, "t")], False),
    ("1", "s", [(SECRET_HEADER, "t"), (SECRET_HEADER, "s")], False),
    ("1", "s", [(SECRET_HEADER, "s")], True),
    ("1", "", [], True),  # a cluster's HAProxy
    ("0", "", [], False),
)
def test_internal_headers_stay_where_haproxy_sent_them(
    monkeypatch, haproxy, secret, sent, is_believed
):
    monkeypatch.setenv(HA_PROXY, haproxy)
    monkeypatch.setenv(HAPROXY_SECRET, secret)
    more = [("host", "x"), ("authorization", "a"), ("accept", "1"), ("accept", "2")]
    kept, keys = NormalForm(str).of([FORGED, *more, *sent])
    assert keys == ["a"]
    assert kept == [more[0], *more[2:], *([FORGED] if is_believed else [])]


async def test_over_grpc_one_key_counts_and_the_first_of_what_is_repeated(tmp_path):
    normal_form.cache_clear()
    context = context_of()
    own = (("priority", "u=1"), ("priority", "u=7"), FORGED, ("authorization", f"Bearer {KEY}"))
    context._invocation_metadata = (*own, own[-1])
    call = GrpcCall(OPEN_INFERENCE, "ModelInfer", context)
    assert call.options()[3:5] == ("u=1", None)
    service = FakeService(Settings(api_keys_file=write_keys(tmp_path)))
    interface = OpenInferenceInterface(Inference(service))
    await interface.call("ModelInfer", stream_of(b""), context)
    assert context.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "send one header" in context.details()
