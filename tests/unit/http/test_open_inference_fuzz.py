"""Whatever is sent to /v2: never a 500, errors in the protocol's form, statuses as documented."""

import gzip
import json
from functools import cache
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http.api import create_api
from tests.support.open_inference import HEADER_LENGTH, Graph, binary_request, elements
from tests.support.raw_asgi import Asked, Header, Told, ask

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=SLOW)
INFER = "/v2/models/{model_name}/infer"
GOOD, _ = binary_request(elements(b"good"), outputs=[{"name": "label"}])
VALUES = st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\r\n\0"))
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 300)
CODINGS = st.sampled_from([b"gzip", b"deflate", b"identity", b"br", b"GZIP", b"gzip,gzip"])
LENGTHS = NUMBERS.map(lambda n: str(n).encode())
HEADERS = st.one_of(
    st.tuples(st.just(HEADER_LENGTH.encode()), LENGTHS | VALUES),
    st.tuples(st.just(b"content-encoding"), CODINGS | VALUES),
    st.tuples(st.sampled_from([b"content-type", b"priority", b"x-request-id"]), VALUES),
)
ZIPPED = [gzip.compress(data, mtime=0) for data in (GOOD, bytes(10**7))]
PIECES = st.sampled_from([GOOD, GOOD[:-1], GOOD + b"x", *ZIPPED, b"{", b"[]"])
NAMES = st.sampled_from(["imagenette", "imagenette.resnet50", "nothing", "a/b", "%2e%2e", "ü"])


@cache
def api() -> Any:
    return create_api(Graph().service)


@cache
def description() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(ask(api(), Asked("GET", "/openapi.json")).body)
    return described


def check(told: Told, way: dict[str, Any], more: set[int]) -> None:
    """Hold an answer to the description of the interface."""
    documented = {int(status) for status in way["responses"]} | more
    assert told.status in documented, (told.status, told.body)
    if told.status >= 400:
        assert told.headers is not None
        assert told.headers[b"content-type"] == b"application/json"
        reference = {"$ref": "#/components/schemas/ProtocolError"}
        jsonschema.validate(json.loads(told.body), {**reference, **description()})


@EXAMPLES
@given(st.lists(HEADERS, max_size=4), PIECES | st.binary(max_size=90), st.booleans())
def test_any_headers_and_any_body(headers: list[Header], body: bytes, hangs_up: bool):
    path = "/v2/models/imagenette/infer"
    told = ask(api(), Asked("POST", path, headers=headers, chunks=[body], hangs_up=hangs_up))
    check(told, description()["paths"][INFER]["post"], {499} if hangs_up else set())


PATHS = st.sampled_from([path for path in description()["paths"] if path.startswith("/v2")])
VERSIONS = st.sampled_from(["1", "2", "", "x", "-1"]) | st.text(max_size=4)
METHODS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE"])


@EXAMPLES
@given(PATHS, NAMES | st.text(min_size=1, max_size=8), VERSIONS, METHODS)
def test_any_model_version_and_method(path: str, name: str, version: str, method: str):
    sent = path.replace("{model_name}", name).replace("{model_version}", version)
    told = ask(api(), Asked(method, sent, chunks=[b"{}"]))
    way = description()["paths"][path].get(method.lower(), {"responses": {}})
    if told.status != 307 and method != "HEAD":
        check(told, way, {404, 405})
