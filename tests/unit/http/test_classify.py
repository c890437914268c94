"""POST /v1/classify: answers, refusals, and what of a request is passed on."""

import asyncio
import gzip
import logging
import zlib
from dataclasses import replace

import httpx
import pytest

from app import errors
from app.answers import Fault
from app.http.api import create_api
from app.http.classify import WATCHED_AFTER_S, WatchedRequest
from tests.support.cases import cases
from tests.support.raw_asgi import REQUESTS, STATUSES, Asked, ask

pytestmark = pytest.mark.usefixtures("behind_haproxy")

CLASSIFY = "/v1/classify"
TIMEOUT = "x-request-timeout-seconds"
FORM = "application/x-www-form-urlencoded"
ID = (b"x-request-id", b"r1")


def form_of(*images):
    """Return the body of a form, and the header that says so."""
    request = httpx.Request("POST", "http://x", files=[("f", ("a", data)) for data in images])
    headers = {"content-type": request.headers["content-type"]}
    return {"content": request.read(), "headers": headers}


def coded(coding, sent=None):
    """Return a request that says that its body is coded."""
    sent = sent or {"content": b"image"}
    return {**sent, "headers": sent.get("headers", {}) | {"content-encoding": coding}}


def bomb(sent):
    """Return the first 999 bytes of the coded body."""
    return coded("gzip", {**sent, "content": gzip.compress(sent["content"])[:999]})


async def silence():
    yield b"ima"
    await asyncio.Future()


async def not_to_be_read():
    raise AssertionError("the body was asked for")
    yield b""


async def test_the_body_itself_is_the_image(client, service):
    answer = await client.post(CLASSIFY, content=b"image one")
    assert answer.status_code == 200
    assert answer.json()["predictions"] == [{"index": 0, "label": "image one", "probability": 0.75}]
    assert "null" not in answer.text  # absent values are left out
    (asked,) = service.requests
    assert (asked.files, asked.lane) == ([b"image one"], "interactive")
    assert (asked.top_k, asked.timeout_s) == (5, 10.0)
    await client.post(CLASSIFY, content=b"image", headers={"priority": "u=6"})
    assert service.requests[1].lane == "bulk"


@cases("content_type", "image/jpeg", "application/x-www-form-urlencoded", "text/plain", "")
async def test_any_content_type_but_multipart_is_an_image(client, content_type):
    headers = {"content-type": content_type}
    assert (await client.post(CLASSIFY, content=b"image", headers=headers)).status_code == 200


async def test_a_bad_image_is_answered_with_its_own_status(client):
    answer = await client.post(CLASSIFY, content=b"text", headers={"x-request-id": "r1"})
    assert answer.status_code == 400
    error = {"code": "not_an_image", "message": "these bytes are no image", "request_id": "r1"}
    assert answer.json() == {"error": error}


async def test_a_form_answers_every_file_in_order(client, service):
    files = [("files", (f"{i}", data)) for i, data in enumerate([b"image a", b"no", b"image b"])]
    answer = await client.post(CLASSIFY, files=files, headers={"x-request-id": "r2"})
    assert answer.status_code == 200
    body = answer.json()
    first, second, third = body["results"]
    assert first["predictions"][0]["label"] == "image a"
    assert second["error"]["code"] == "not_an_image"
    assert third["predictions"][0]["label"] == "image b"
    ids = [first["request_id"], second["error"]["request_id"], third["request_id"]]
    assert [*ids, body["request_id"]] == ["r2"] * 4
    (asked,) = service.requests
    assert (asked.files, asked.lane) == ([b"image a", b"no", b"image b"], "bulk")


@pytest.mark.parametrize(("value", "top_k"), [("1", 1), ("10", 10), ("2&top_k=3", 3)])
async def test_the_ends_of_top_k_and_the_last_of_two(client, service, value, top_k):
    assert (await client.post(f"{CLASSIFY}?top_k={value}", content=b"image")).status_code == 200
    assert service.requests[0].top_k == top_k


@pytest.mark.parametrize("name", [TIMEOUT, errors.TIMEOUT_COPY])
@pytest.mark.parametrize("value", ["NaN", "-1", "0", "abc", "", "-inf", "1 s"])
async def test_a_timeout_that_makes_no_sense_is_refused(client, service, value, name):
    answer = await client.post(CLASSIFY, content=b"image", headers={name: value})
    assert answer.status_code == 422
    assert TIMEOUT in answer.json()["error"]["message"]
    assert service.requests == []


@pytest.mark.parametrize(("value", "expected"), [("2.5", 2.25), ("9999", 10.0), ("inf", 10.0)])
@pytest.mark.parametrize("name", [TIMEOUT, errors.TIMEOUT_COPY])
async def test_a_client_can_only_ask_for_less_time(client, service, value, expected, name):
    """Of what it asks for 90 % are used: at 100 % Serve answers itself, and not in JSON."""
    await client.post(CLASSIFY, content=b"image", headers={name: value})
    assert service.requests[0].timeout_s == expected


async def test_the_request_id_goes_through(client, service):
    answer = await client.post(CLASSIFY, content=b"image", headers={"x-request-id": "mine"})
    assert answer.json()["request_id"] == "mine"
    ids = [(await client.post(CLASSIFY, content=b"image")).json()["request_id"] for _ in "ab"]
    assert len(set(ids)) == 2  # without it, one is made
    assert [request.request_id for request in service.requests] == ["mine", *ids]


@pytest.mark.parametrize("limit", [None, 20])
async def test_nothing_is_read_of_a_request_that_is_one_too_many(client, service, limit):
    service.admission.is_full, service.admission.limit = True, limit
    answer = await client.post(CLASSIFY, content=b"image")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers.get(errors.LIMIT_HEADER) == (limit and str(limit))
    assert service.requests == []


async def test_what_haproxy_refused_is_counted(client, service):
    for told in ("300", "no number", "-3", "99999999999999999999"):
        await client.post(CLASSIFY, content=b"image", headers={errors.REFUSED_HEADER: told})
    await client.post(CLASSIFY, content=b"image")
    assert service.admission.num_refused_before == 300 + errors.MAX_REFUSED


ZIPPED, IMAGES = gzip.compress(b"image", mtime=0), (None, form_of(b"image"))
CODINGS = ("br", "zstd", "gzip, gzip")
UNKNOWN = (415, "unsupported_coding", "as it is")
DAMAGED = (400, "bad_coding", "as it is")
INFLATED = (413, "too_many_bytes", "inflates to more than 1000 bytes")
LONG = (413, "too_many_bytes", "1001 bytes or more, the limit is 1000")
EXPECTS = {"expect": "100-continue", "content-length": "1001"}


@cases(
    "sent, status, code, says",
    ({"content": b"image" + bytes(996)}, *LONG),
    ({"files": [("f", ("a", b"image"))] * 4}, 413, "too_many_files", "more than 3 files"),
    ({"headers": {"priority": "u=9"}}, 422, "bad_parameter", "0 to 7"),
    *((coded(coding, body), *UNKNOWN) for coding in CODINGS for body in IMAGES),
    *((coded(coding, body), *DAMAGED) for coding in ("gzip", "deflate") for body in IMAGES),
    *((coded("gzip", {"content": body}), *DAMAGED) for body in (ZIPPED[:-9], ZIPPED * 2, b"")),
    (coded("deflate", {"content": ZIPPED}), *DAMAGED),
    (bomb({"content": bytes(10**7)}), *INFLATED),
    (bomb(form_of(bytes(10**7))), *INFLATED),
    ({"content": silence(), "headers": {TIMEOUT: "0.001"}}, 408, "slow_body", "had not arrived"),
    ({"content": not_to_be_read(), "headers": EXPECTS}, *LONG),
)
async def test_what_is_refused(client, service, sent, status, code, says):
    answer = await client.post(CLASSIFY, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert says in error["message"]
    is_cut = status == 408 or sent.get("headers") is EXPECTS  # a body that is not read to its end
    assert (answer.headers.get("connection") == "close") is is_cut
    assert (service.requests, service.byte_budget.num_held) == ([], 0)


async def test_members_that_were_skipped_are_named_and_else_not_mentioned(client, service):
    assert "skipped_members" not in (await client.post(CLASSIFY, content=b"image")).json()
    service.skipped = ["b"]
    answer = (await client.post(CLASSIFY, content=b"image")).json()
    assert (answer["skipped_members"], answer["degraded"]) == (["b"], False)


@cases(
    "content_type, status, code, is_hinted",
    (FORM, 400, "corrupt_image", True),
    (FORM, 422, "too_many_pixels", False),
    ("image/jpeg", 400, "corrupt_image", False),
)
async def test_a_file_that_curl_may_have_altered_is_told_so(
    client, service, monkeypatch, content_type, status, code, is_hinted
):
    monkeypatch.setattr(service, "_one", lambda *_: Fault(status, code, "It is cut short."))
    answer = await client.post(CLASSIFY, content=b"image", headers={"content-type": content_type})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    hint = " With curl: --data-binary, since -d alters it." if is_hinted else ""
    assert error["message"] == f"It is cut short.{hint}"


@cases("coding, code", ("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress))
async def test_coded_images_and_forms(client, coding, code):
    sent = coded(coding, {"content": code(b"image")})
    assert (await client.post(CLASSIFY, **sent)).status_code == 200
    form = form_of(b"image one", b"image two")
    answer = await client.post(CLASSIFY, **coded(coding, form | {"content": code(form["content"])}))
    assert len(answer.json()["results"]) == 2


async def test_every_route_that_is_read_answers_head(client):
    described = (await client.get("/openapi.json")).json()["paths"]
    paths = [path for path, ways in described.items() if "get" in ways]
    assert len(paths) > 10
    pages = ["/", "/docs", "/openapi.json", "/page/page.js", "/docs/assets/swagger-ui-bundle.js"]
    for path in pages + paths:
        known = path.replace("{model_name}", "imagenette").replace("{model_version}", "1")
        told, asked = await client.head(known), await client.get(known)
        assert (told.status_code, told.content) == (asked.status_code, b"")
        assert told.headers == asked.headers
        assert told.headers["content-length"] == str(len(asked.content))
    answer = await client.head(CLASSIFY)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


class Channel:
    """ASGI's receive as a server has it: after the body nothing until the client has gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._has_body = True

    async def receive(self) -> dict:
        if self._has_body:
            self._has_body = False
            return {"type": "http.request", "body": b"image"}
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def answer(channel: Channel, done: asyncio.Event) -> str:
    with WatchedRequest(channel.receive) as watched:
        assert (await watched())["body"] == b"image"
        await done.wait()
    return "answered"


async def test_a_client_that_stays_gets_its_answer_and_nothing_is_left_that_waits():
    channel, done = Channel(), asyncio.Event()
    task = asyncio.create_task(answer(channel, done))
    await asyncio.sleep(2 * WATCHED_AFTER_S)  # it is watched
    assert not task.done()
    done.set()
    assert await task == "answered"
    assert not channel.gone._waiters
    channel.gone.set()
    await asyncio.sleep(0)  # cancelled, this would raise


@pytest.mark.parametrize("after_s", [0.0, 2 * WATCHED_AFTER_S])
async def test_a_client_that_hangs_up_ends_its_request_and_no_other(after_s):
    done, stays, goes = asyncio.Event(), Channel(), Channel()
    staying, going = [asyncio.create_task(answer(channel, done)) for channel in (stays, goes)]
    await asyncio.sleep(after_s)
    goes.gone.set()
    async with asyncio.timeout(10):
        with pytest.raises(errors.ClientGoneError):
            await going
    done.set()
    assert await staying == "answered"


async def test_only_work_under_way_is_cancelled_and_other_cancellations_stay():
    channel, done = Channel(), asyncio.Event()
    done.set()
    assert await answer(channel, done) == "answered"
    channel.gone.set()
    await asyncio.sleep(2 * WATCHED_AFTER_S)  # cancelled, this would raise
    task = asyncio.create_task(answer(Channel(), asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_while_its_body_still_comes_a_request_is_not_looked_at():
    """A disconnect is the reader's to see then: the watch would take a chunk of the body."""
    messages = [b"first", b"last"]

    async def receive() -> dict:
        return {"type": "http.request", "body": messages.pop(0), "more_body": bool(messages)}

    with WatchedRequest(receive) as watched:
        await watched()
        await asyncio.sleep(2 * WATCHED_AFTER_S)
        assert messages == [b"last"]
        assert not (await watched())["more_body"]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_gets_one_answer_with_its_identity(service, name):
    asked = REQUESTS[name]
    answer = ask(create_api(service), replace(asked, headers=[*asked.headers, ID]))
    assert answer.status == STATUSES[name]
    assert b"r1" in answer.body


def test_an_error_of_ours_is_answered_logged_and_raised(service, caplog):
    service.raises = ValueError("a defect")
    api = create_api(service)

    async def caught(scope, receive, send) -> None:
        with pytest.raises(ValueError, match="a defect"):
            await api(scope, receive, send)

    with caplog.at_level(logging.ERROR):
        answer = ask(caught, Asked(headers=[ID], chunks=(b"image",)))
    assert answer.status == 500
    assert caplog.text.count("request r1 failed") == 1


@cases(
    "query, status, text",
    (b"top_k=x", 422, b"top_k is 'x'; give a whole number"),
    (b"top_k=2.5", 422, b"top_k is '2.5'"),
    (b"top_k=1_0", 422, b"top_k is '1_0'"),
    ("top_k=²".encode(), 422, b"top_k is "),
    (b"top_k=", 422, b"top_k is ''"),
    (b"top_k=nan", 422, b"top_k is 'nan'"),
    (b"top_k=-1", 422, b"top_k is -1; this model set has 10 classes"),
    (b"top_k=0", 422, b"top_k is 0"),
    (b"top_k=11", 422, b"top_k is 11"),
    (b"top_k=" + b"9" * 4000, 422, b"top_k is 999"),
    (b"top_k=" + b"9" * 5000, 422, b"top_k is 999"),
    (b"threshold=x", 422, b"threshold is 'x'; give a number"),
    (b"threshold=0.5_0", 422, b"threshold is '0.5_0'; give a number"),
    (b"threshold=0.%D9%A5", 422, b"give a number"),  # a digit, but not of ASCII
    (b"threshold=0.5", 422, b"exclude each other"),
    (b"top_k=2&top_k=3", 200, b"image"),
    (b"top%5Fk=99", 422, b"top_k is 99"),
    (b"other=1", 200, b"image"),
)
def test_the_query(service, query, status, text):
    answer = ask(create_api(service), Asked(query=query, headers=[ID], chunks=(b"image",)))
    assert answer.status == status
    assert text in answer.body
    assert len(service.requests) == (status == 200)
    if status == 422:
        assert b'"bad_parameter"' in answer.body
        assert len(answer.body) < 400  # the offending value is not sent back whole


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/classify", 405), ("POST", "/v1/classify/", 404), ("GET", "/v1/models/", 404)],
)
def test_another_method_or_path_is_an_error_and_no_redirect(service, method, path, status):
    answer = ask(create_api(service), Asked(method=method, path=path, chunks=(b"image",)))
    assert answer.status == status
    assert b"location" not in dict(answer.headers or {})
