"""Whatever is sent is answered as documented: never a 500, and errors in their form."""

import gzip
import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks

from app.http.api import create_api
from app.settings import Settings
from tests.support.asgi_client import KEY, write_keys
from tests.support.fakes import NOT_AN_IMAGE, FakeService
from tests.support.open_inference import HEADER_LENGTH, Graph, binary_request, elements
from tests.support.raw_asgi import Asked, Header, Told, ask

MAX_BODY = 2000
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
# The same examples every time: a build fails for what was changed.
EXAMPLES = settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=SLOW)
# What a server lets through: h11 and httptools refuse line ends and zeros in a header.
VALUES = st.binary(max_size=60).map(lambda raw: raw.translate(None, b"\r\n\0"))
TIMES = st.sampled_from([b"nan", b"inf", b"-inf", b"1e309", b"-0", b"1_0", "½".encode(), b"9" * 99])
PRIORITIES = st.sampled_from([b"u=1", b"u=9", b"u=-1", b"u", b"u=3;q=1", b"i, u=7", b"u=1, u=8"])
FORM = b"multipart/form-data"
CHARSETS = [b"\xff", b"nothing", b"undefined", b"idna", b"punycode"]
KINDS = st.sampled_from(
    [
        *(b"image/jpeg", FORM, FORM + b"; boundary=b", FORM + b"; boundary="),
        *(FORM + b'; boundary="b', FORM + b"; boundary=" + b"b" * 300),
        *(b"multipart/\xff; boundary=\xff", b"Multipart/Mixed; boundary=b; boundary=c"),
        *(FORM + b"; charset=%s; boundary=b" % charset for charset in CHARSETS),
    ]
)
LENGTHS = st.integers(-9, 10**20).map(lambda n: b"%d" % n)
OTHERS = st.sampled_from([b"range", b"if-none-match", b"accept", b"expect", b"host", b"origin"])
HEADERS = st.one_of(
    st.tuples(st.just(b"content-type"), KINDS | VALUES),
    st.tuples(st.just(b"content-length"), LENGTHS | VALUES),
    st.tuples(st.just(b"x-request-timeout-seconds"), TIMES | VALUES),
    st.tuples(st.just(b"priority"), PRIORITIES | VALUES),
    st.tuples(st.just(b"x-request-id"), VALUES),
    st.tuples(OTHERS, VALUES),
    st.tuples(st.binary(min_size=1, max_size=9).map(bytes.lower), VALUES),
)
PIECES = st.sampled_from(
    [
        *(b"--b\r\n", b"--b--\r\n", b"--b", b"\r\n", b"\r\n\r\n", b"image", b"\0" * 30),
        b'Content-Disposition: form-data; name="files"; filename="a"\r\n',
        b'Content-Disposition: form-data; name="top_k"\r\n',
        b"Content-Disposition: form-data\r\n",
        b"Content-Disposition: form-data; name=\"f\"; filename*=UTF-8''%ff\r\n",
        b'content-disposition: form-data; name="\xff"; filename="\xff"\r\n',
        b"Content-Type: text/plain; charset=\xff\r\n",
        b"Content-Transfer-Encoding: base64\r\n",
        b"X: " + b"y" * 400 + b"\r\n",
    ]
)
CHUNKS = st.lists(st.binary(max_size=120) | PIECES, min_size=1, max_size=12)
FILE = b'--b\r\nContent-Disposition: form-data; name="\xff"; filename="a"\r\n\r\nimage\r\n'
FORM_CHUNKS = CHUNKS | CHUNKS.map(lambda chunks: [FILE, *chunks])
FORMS = KINDS.filter(lambda kind: b"=b" in kind).map(lambda kind: (b"content-type", kind))
NAMES = st.sampled_from(["top_k", "top_k[]", "TOP_K", "x"])
NUMBERS = st.integers().map(str) | st.floats().map(str) | st.text(max_size=20)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
PATHS = st.sampled_from(["/v1/classify", "/v1/models", "/healthz", "/readyz"])


class AnyService(FakeService):
    """Takes any bytes."""

    def _one(self, data: bytes, request_id: str) -> Any:
        return super()._one(b"image", request_id) if data.startswith(b"image") else NOT_AN_IMAGE


@cache
def api() -> Any:
    return create_api(AnyService(Settings(max_body_bytes=MAX_BODY, max_files=3)))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = write_keys(tmp_path_factory.mktemp("fuzz"))
    return create_api(AnyService(Settings(api_keys_file=keys)))


@cache
def description() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(ask(api(), Asked("GET", "/openapi.json")).body)
    return described


def check(asked: Asked, told: Told, form: str = "ErrorAnswer", template: str = "") -> None:
    """Hold the answer to the description of the interface; ``template`` is the path's."""
    ways = description()["paths"].get(template or asked.path, {})
    way = ways.get("get" if asked.method == "HEAD" else asked.method.lower())
    documented = {int(s) for s in way["responses"]} if way else {404, 405}
    if asked.hangs_up:
        documented |= {499}  # nobody sees it
    if "{" in template:  # no such model, or a name that makes another path
        documented |= {404, 405}
    assert told.status in documented, (told.status, told.body)
    if told.status < 400 or asked.method == "HEAD":
        return
    assert told.headers is not None
    assert told.headers[b"content-type"] == b"application/json"
    reference = {"$ref": f"#/components/schemas/{form}"}
    jsonschema.validate(json.loads(told.body), {**reference, **description()})


@EXAMPLES
@given(st.lists(HEADERS, max_size=6), CHUNKS, st.booleans())
def test_any_headers_and_any_body(headers: list[Header], chunks: list[bytes], hangs_up: bool):
    asked = Asked(headers=headers, chunks=chunks, hangs_up=hangs_up)
    check(asked, ask(api(), asked))


@EXAMPLES
@given(FORMS, FORM_CHUNKS, st.booleans())
def test_forms_of_any_pieces(form: Header, chunks: list[bytes], hangs_up: bool):
    asked = Asked(headers=[form], chunks=chunks, hangs_up=hangs_up)
    told = ask(api(), asked)
    check(asked, told)
    if told.status == 200:
        assert 1 <= len(json.loads(told.body)["results"]) <= 3


@EXAMPLES
@given(st.lists(st.tuples(NAMES, NUMBERS), max_size=3), st.binary(max_size=40))
def test_any_parameters(parameters: list[tuple[str, str]], raw: bytes):
    query = "&".join(f"{name}={value}" for name, value in parameters)
    for sent in (query.encode("utf-8", "surrogatepass"), raw):
        asked = Asked(query=sent, chunks=[b"image"])
        check(asked, ask(api(), asked))


@EXAMPLES
@given(st.sampled_from(METHODS), PATHS | st.text(max_size=20).map(lambda text: f"/v1/{text}"))
def test_any_method_and_path(method: str, path: str):
    asked = Asked(method, path, chunks=[b"image"])
    told = ask(api(), asked)
    if told.status == 307:  # a slash too many at the end of what exists
        assert path.rstrip("/") in description()["paths"]
    else:
        check(asked, told)


@EXAMPLES
@given(value=VALUES, more=st.lists(HEADERS, max_size=3))
def test_no_authorization_but_the_key_opens(value: bytes, more: list[Header], guarded: Any):
    told = ask(guarded, Asked(headers=[*more, (b"authorization", value)], chunks=[b"image"]))
    assert told.status == 401
    assert told.headers is not None
    assert told.headers[b"www-authenticate"].startswith(b"Bearer")
    assert KEY.encode() not in told.body


INFER = "/v2/models/{model_name}/infer"
GOOD, _ = binary_request(elements(b"good"), outputs=[{"name": "label"}])
SHORT = st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\r\n\0"))
CODINGS = st.sampled_from([b"gzip", b"deflate", b"identity", b"br", b"GZIP", b"gzip,gzip"])
JSON_BYTES = (st.integers(-(2**70), 2**70) | st.integers(-2, 300)).map(lambda n: b"%d" % n)
HEADERS_OF_V2 = st.one_of(
    st.tuples(st.just(HEADER_LENGTH.encode()), JSON_BYTES | SHORT),
    st.tuples(st.just(b"content-encoding"), CODINGS | SHORT),
    st.tuples(st.sampled_from([b"content-type", b"priority", b"x-request-id"]), SHORT),
)
ZIPPED = [gzip.compress(data, mtime=0) for data in (GOOD, bytes(10**7))]
BODIES = st.sampled_from([GOOD, GOOD[:-1], GOOD + b"x", *ZIPPED, b"{", b"[]"])


@cache
def graph() -> Any:
    return create_api(Graph().service)


@settings(EXAMPLES, max_examples=200)
@given(st.lists(HEADERS_OF_V2, max_size=4), BODIES | st.binary(max_size=90), st.booleans())
def test_any_headers_and_any_body_of_v2(headers: list[Header], body: bytes, hangs_up: bool):
    path = "/v2/models/imagenette/infer"
    asked = Asked("POST", path, headers=headers, chunks=[body], hangs_up=hangs_up)
    told = ask(graph(), asked)
    assert told.status not in (404, 405)
    check(asked, told, "ProtocolError", INFER)


V2 = st.sampled_from([path for path in description()["paths"] if path.startswith("/v2")])
MODELS = st.sampled_from(["imagenette", "imagenette.resnet50", "nothing", "a/b", "%2e%2e", "ü"])
VERSIONS = st.sampled_from(["1", "2", "", "x", "-1"]) | st.text(max_size=4)


@settings(EXAMPLES, max_examples=200)
@given(
    V2,
    MODELS | st.text(min_size=1, max_size=8),
    VERSIONS,
    st.sampled_from([*METHODS[:4], "DELETE"]),
)
def test_any_model_version_and_method(path: str, name: str, version: str, method: str):
    sent = path.replace("{model_name}", name).replace("{model_version}", version)
    asked = Asked(method, sent, chunks=[b"{}"])
    if (told := ask(graph(), asked)).status != 307 and method != "HEAD":
        check(asked, told, "ProtocolError", path)


NUM_DRAWN = 25  # of each operation
# The status codes that are documented, the documents' schemas, and never a 5xx that is none of
# them.
CHECKED: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
schema = schemathesis.openapi.from_asgi("/openapi.json", graph())


ANY_CASE = settings(
    max_examples=NUM_DRAWN, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@schema.parametrize()
@ANY_CASE
def test_every_operation_answers_as_the_schema_says(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKED)
