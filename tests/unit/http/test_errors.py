"""Every error has a documented status, a code and one form of JSON; requests have an identity."""

import logging
import pickle
import uuid

import pytest

from app.errors import DeadlineError, FunctionError, NotReadyError, OverloadedError
from app.http.body import Headers, new_request_id
from app.http.errors import ERRORS
from app.http.open_inference import INFER_ERRORS, REGISTERING
from models.errors import NotAnImageError, TandemError
from tests.support.cases import cases


def tree(root=TandemError):
    yield root
    for branch in root.__subclasses__():
        if not branch.__module__.startswith("ray."):  # Ray makes a class for each it unwraps
            yield from tree(branch)


ALL = list(tree())
UNSEEN = {499}  # the client is gone: nobody sees the status
INTERNAL = {500}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_documented_status(kind):
    assert kind.status in {*ERRORS, *INFER_ERRORS, *REGISTERING} | UNSEEN | INTERNAL
    assert kind.__doc__


def test_two_errors_share_a_code_only_with_their_own_base_and_its_status():
    for kind in ALL:
        for other in ALL:
            if kind.code == other.code:
                assert issubclass(kind, other) or issubclass(other, kind), (kind, other)
                assert kind.status == other.status


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_errors_survive_the_way_between_processes(kind):
    back = pickle.loads(pickle.dumps(kind("12 is over the limit of 3")))
    assert type(back) is kind
    assert back.message == str(back) == "12 is over the limit of 3"


@cases(
    "method, path, status",
    ("GET", "/nothing", 404),
    ("GET", "/page/", 404),
    ("GET", "/page/nothing.js", 404),
    ("GET", "/page/..%2fpages.py", 404),
    ("GET", "/page/../http_api.py", 404),
    ("GET", "/page/%2e%2e/http_api.py", 404),
    ("GET", "/docs/assets/nothing.js", 404),
    ("GET", "/v1/classify", 405),
    ("DELETE", "/healthz", 405),
    ("POST", "/page/page.js", 405),
)
async def test_what_is_not_there_is_answered_in_the_same_form(client, method, path, status):
    answer = await client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == "http"
    assert method in error["message"]
    assert error["request_id"]


async def test_a_wrong_method_is_told_the_right_one(client):
    message = (await client.get("/v1/classify")).json()["error"]["message"]
    assert message.startswith("GET /v1/classify: Method Not Allowed, use POST; see /docs")
    assert (await client.get("/v1/classify")).headers["allow"] == "POST"
    assert (await client.post("/v1/traffic")).headers["allow"] == "GET, HEAD, PUT"
    assert (await client.delete("/v1/feedback")).headers["allow"] == "GET, HEAD, POST"


async def test_ready_and_not(client, service):
    assert (await client.get("/readyz")).json() == {"ready": True}
    service.not_ready = NotReadyError("resnet50 does not answer")
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert (await client.get("/healthz")).json() == {"ready": True}


@cases(
    "error, status, logged",
    (FunctionError("combine failed"), 500, "request r1: combine failed"),
    (ZeroDivisionError("secret /etc/path"), 500, "request r1 failed"),
    (NotAnImageError("no image"), 400, None),
    (OverloadedError("full"), 429, None),
    (NotReadyError("no member yet"), 503, None),
    (DeadlineError("too late"), 504, None),
)
async def test_an_error_has_its_status_and_a_log(client, service, caplog, error, status, logged):
    service.raises = error
    with caplog.at_level(logging.ERROR, "ray.serve"):
        answer = await client.post("/v1/classify", content=b"image", headers={"x-request-id": "r1"})
    lines = [(record.message, record.request_id) for record in caplog.records]
    assert lines == ([] if logged is None else [(logged, "r1")])
    assert (answer.status_code, answer.json()["error"]["request_id"]) == (status, "r1")
    assert "secret" not in answer.text  # an unexpected error tells the log, and not the client
    assert answer.json()["error"]["code"] == getattr(error, "code", "internal")
    if logged is None:
        expected = {"code": error.code, "message": str(error), "request_id": "r1"}
        assert answer.json() == {"error": expected}
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert ("secret" in caplog.text) is ("secret" in str(error))


def test_an_identity_is_the_first_that_was_sent_or_a_random_uuid():
    ids = [new_request_id() for _ in range(200)]
    for text in ids:
        found = uuid.UUID(text)
        assert (str(found), found.version, found.variant) == (text, 4, uuid.RFC_4122)
    assert len(set(ids)) == len(ids)
    assert {text[19] for text in ids} == set("89ab")  # all that the variant leaves open
    headers = Headers({"headers": [(b"x-request-id", b"one"), (b"x-request-id", b"two")]})
    assert (headers.request_id, headers.joined(b"x-request-id")) == ("one", "one, two")
    scope = {"headers": [(b"x-request-id", b"")]}
    assert Headers(scope).request_id == Headers(scope).request_id
