"""The response cache through both interfaces, with the real stages on tiny networks."""

import re

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.http.api import create_api
from app.serve.gateway import assemble
from app.settings import Settings
from tests.support.asgi_client import asgi_client
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.tiny_networks import picture

TIMES = re.compile(rb'("(?:total|start_ms|duration_ms)"):[0-9.e-]+')
SAME = 1e-6  # of what is computed again, in another batch perhaps


@pytest.fixture(scope="module")
def services(tiny_set):
    """One with a cache and one without; each test sends pictures of its own size."""
    more = {"model_set": str(tiny_set), "compile_cache": None, "default_top_k": 3}
    return {cache: assemble(Settings(**more, cache=cache)).service for cache in ("none", "local")}


@pytest.fixture
async def clients(services):
    clients = {cache: asgi_client(create_api(service)) for cache, service in services.items()}
    yield clients
    for client in clients.values():
        await client.aclose()


async def post(client, data, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post("/v1/classify", content=data, headers={"x-request-id": "r1"} | named)


async def test_answers_of_a_service_without_cache_are_as_ever(clients):
    """Byte for byte, but for the times; a service with one differs by what the cache adds."""
    data = picture("red", side=30)
    first, second = [(await post(clients["none"], data)).content for _ in range(2)]
    assert TIMES.sub(rb"\1:0", first) == TIMES.sub(rb"\1:0", second)
    assert list((await post(clients["none"], data)).json()) == [
        *["model_set", "model_version", "predictions", "members", "agreement", "degraded"],
        "plan",
        "request_id",
        "timings_ms",
    ]
    assert b"cache" not in first
    miss = TIMES.sub(rb"\1:0", (await post(clients["local"], data)).content)
    bar = b'{"stage":"cache","start_ms":0,"duration_ms":0},'
    assert bar in miss
    assert miss.replace(bar, b"") == TIMES.sub(rb"\1:0", first)


async def test_a_hit_over_http(clients):
    data = picture("blue", side=31)
    miss, hit = [(await post(clients["local"], data)).json() for _ in range(2)]
    assert "cached" not in miss
    assert hit["cached"] is True
    assert [stage["stage"] for stage in hit["timings_ms"]["stages"]] == ["read", "cache"]
    for key in ("model_set", "predictions", "members", "agreement", "degraded"):
        assert hit[key] == miss[key]


def check_agree(ours: dict, theirs: dict) -> None:
    assert ours["members"].keys() == theirs["members"].keys()
    pairs = [(ours, theirs), *((ours["members"][m], theirs["members"][m]) for m in ours["members"])]
    for mine, yours in ((a["predictions"], b["predictions"]) for a, b in pairs):
        assert [p["label"] for p in mine] == [p["label"] for p in yours]
        expected = [p["probability"] for p in yours]
        assert [p["probability"] for p in mine] == pytest.approx(expected, abs=SAME)


@pytest.mark.parametrize(
    ("control", "expected"),
    [(None, True), ("max-age=0", True), ("no-cache", None), ("No-Store", None)],
)
async def test_cache_control(clients, control, expected):
    data, sent = picture("green", side=35), {"cache_control": control} if control else {}
    await post(clients["local"], data)
    assert (await post(clients["local"], data, **sent)).json().get("cached") is expected
    assert (await post(clients["none"], data, **sent)).json().get("cached") is None


async def test_no_store_leaves_nothing_and_counts_wherever_it_stands(clients):
    data = picture("blue", side=36)
    headers = [("cache-control", "no-cache"), ("Cache-Control", "max-age=0, no-store")]
    for _ in range(2):
        answer = await clients["local"].post("/v1/classify", content=data, headers=headers)
        assert "cached" not in answer.json()
    assert "cached" not in (await post(clients["local"], data)).json()


async def classify(service, *images, **metadata):
    context = context_of(**metadata)
    incoming = stream_of(ClassifyRequest(images=images).SerializeToString())
    reply = await GrpcInterface(service).classify(incoming, context)
    assert context.code() in (None, grpc.StatusCode.OK)
    return reply


async def test_grpc_shares_it_and_says_so(services, clients):
    data = picture("red", side=37)
    over_http = (await post(clients["local"], data)).json()
    (result,) = (await classify(services["local"], data)).results
    assert result.classified.cached
    check_agree(MessageToDict(result.classified, preserving_proto_field_name=True), over_http)
    (result,) = (await classify(services["none"], data)).results
    assert not result.classified.HasField("cached")


@pytest.mark.parametrize("control", ["no-cache", "no-store"])
async def test_grpc_metadata(services, control):
    data = picture("blue", side=38)
    await classify(services["local"], data)
    (result,) = (await classify(services["local"], data, cache_control=control)).results
    assert not result.classified.HasField("cached")
    (result,) = (await classify(services["local"], data)).results
    assert result.classified.cached


async def test_the_schema_tells_of_it(clients):
    schema = (await clients["none"].get("/openapi.json")).json()["components"]["schemas"]
    assert schema["Classified"]["properties"]["cached"]["type"] == "boolean"
    assert "cached" not in schema["Classified"]["required"]
