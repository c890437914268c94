"""The blocking client: what it sends, what it makes of the answers."""

import logging
import pickle
from typing import Any

import httpx
import pytest

from tandem_client import (
    AsyncClient,
    BadAnswer,
    BadImage,
    BadRequest,
    Client,
    DeadlineExceeded,
    Degraded,
    NotReady,
    Overloaded,
    RetryPolicy,
    ServiceError,
    TandemError,
    Unauthorized,
    Unreachable,
)
from tests.support.http_server import classified
from tests.support.scripted_service import Make, answered, refused

KEY = "k" * 32


def test_an_image_is_the_body_and_the_answer_is_typed(make: Make):
    stage = {"stage": "infer", "start_ms": 1.5, "duration_ms": 8.0, "member": "a", "batch_size": 4}
    more = {
        "cached": True,
        "model_version": "0123456789ab",
        "skipped_members": ["b"],
        "timings_ms": {"total": 9, "stages": [stage]},
    }
    client, service, _ = make(answered("church", **more))
    answer = client.classify(b"photo")
    assert (answer.label, answer.probability, answer.predictions[0].index) == ("church", 0.9, 0)
    assert answer.members["a"].predictions[0].label == "church"
    assert (answer.timings.total_ms, answer.timings.stages[0].batch_size) == (9.0, 4)
    assert (answer.cached, answer.skipped_members, answer.degraded) == (True, ("b",), False)
    assert answer.model_version == "0123456789ab"
    assert answer.raw == classified("church") | more
    (request,) = service.requests
    assert (request.method, str(request.url)) == ("POST", "http://tandem/v1/classify")
    assert request.content == b"photo"
    assert "authorization" not in request.headers
    assert "priority" not in request.headers


def test_what_a_call_asks_for_is_sent(make: Make):
    client, service, _ = make(api_key=KEY)
    client.classify(b"photo", top_k=3, priority=6, timeout=2.5, model_set="a b")
    (request,) = service.requests
    assert request.url.query == b"top_k=3&model_set=a+b"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["priority"] == "u=6"
    assert request.headers["x-request-timeout-seconds"] == "2.500"
    assert request.headers["user-agent"].startswith("tandem-serve-client/")
    timeouts = request.extensions["timeout"]
    assert timeouts == {"connect": 2.5, "read": 2.5, "write": 2.5, "pool": 2.5}


def test_several_are_one_form_with_a_result_each(make: Make, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"first")
    bad = {"error": {"code": "not_an_image", "message": "no image", "request_id": "r2"}}
    rows = {"results": [classified("church"), bad], "request_id": "r2"}
    client, service, _ = make(httpx.Response(200, json=rows))
    first, second = client.classify([tmp_path / "a.jpg", b"second"])
    assert (first.index, first.path, first.get().label) == (0, tmp_path / "a.jpg", "church")
    assert (second.index, second.path, second.answer) == (1, None, None)
    assert isinstance(second.error, BadImage)
    with pytest.raises(BadImage, match="no image"):
        second.get()
    (request,) = service.requests
    assert request.headers["content-type"].startswith("multipart/form-data")
    assert request.content.index(b"first") < request.content.index(b"second")


async def test_an_image_of_several_that_cannot_be_read_has_its_error(make: Make, tmp_path):
    nowhere = tmp_path / "nowhere.jpg"
    rows = httpx.Response(200, json={"results": [classified("church")], "request_id": "r"})
    client, service, _ = make(rows)
    bad, good = client.classify([nowhere, b"photo"])
    assert (bad.path, good.index, good.get().label) == (nowhere, 1, "church")
    assert isinstance(bad.error, BadImage)
    assert bad.error.code == "unreadable"
    assert len(service.requests) == 1

    async with AsyncClient("http://tandem", transport=service.transport) as unasked:
        (only,) = await unasked.classify([nowhere])
    assert isinstance(only.error, BadImage)
    assert len(service.requests) == 1  # without a file there is nothing to ask


def test_a_sequence_of_one_is_a_sequence(make: Make):
    client, _, _ = make(httpx.Response(200, json={"results": [classified()], "request_id": "r"}))
    (result,) = client.classify([b"photo"])
    assert result.get().label == "tench"


def test_no_images_are_no_call(make: Make):
    client, service, _ = make()
    with pytest.raises(ValueError, match="no images"):
        client.classify([])
    assert service.requests == []


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "not_an_image", BadImage),
        (400, "corrupt_image", BadImage),
        (415, "unsupported_format", BadImage),
        (422, "too_many_pixels", BadImage),
        (413, "too_many_bytes", BadImage),
        (413, "too_many_files", BadRequest),
        (422, "bad_parameter", BadRequest),
        (404, "http", BadRequest),
        (401, "unauthorized", Unauthorized),
        (408, "slow_body", DeadlineExceeded),
        (504, "deadline", DeadlineExceeded),
        (429, "overloaded", Overloaded),
        (503, "not_ready", NotReady),
        (503, "other_set", NotReady),
        (500, "internal", ServiceError),
        (429, "a code of tomorrow", Overloaded),
        (418, "a code of tomorrow", BadRequest),
    ],
)
def test_errors_have_the_services_words(make: Make, status, code, kind):
    client, service, _ = make(
        refused(status, code, "what was wrong"), retry=RetryPolicy(max_attempts=1)
    )
    with pytest.raises(TandemError) as caught:
        client.classify(b"photo")
    error = caught.value
    assert type(error) is kind
    assert (error.message, error.code, error.request_id, error.status) == (
        "what was wrong",
        code,
        "r9",
        status,
    )
    assert str(error) == f"what was wrong ({code}, request r9)"
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json="yes"),
        httpx.Response(200, json={}),
        httpx.Response(200, json={"predictions": []}),
        httpx.Response(200, json=classified() | {"predictions": []}),
        httpx.Response(200, json=classified() | {"predictions": 3}),
        httpx.Response(200, json=classified() | {"predictions": [{"index": "x"}]}),
        httpx.Response(200, json=classified() | {"members": []}),
        httpx.Response(200, json=classified() | {"timings_ms": None}),
        httpx.Response(200, json={"results": [classified()]}),
        httpx.Response(200, content=b"\xff\xfe"),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(502, json={"error": "Bad Gateway"}),
        httpx.Response(500),
        httpx.Response(302, headers={"location": "http://other"}),
    ],
    ids=lambda answer: answer.text[:30] or str(answer.status_code),
)
def test_another_service_at_the_address(make: Make, answer):
    client, service, _ = make(answer)
    with pytest.raises(BadAnswer, match="not as Tandem does") as caught:
        client.classify(b"photo")
    assert caught.value.status == answer.status_code
    assert str(answer.status_code) in caught.value.message
    assert len(service.requests) == 1


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_form_with_another_number_of_results(make: Make, num):
    rows = {"results": [classified()] * num, "request_id": "r"}
    client, _, _ = make(httpx.Response(200, json=rows))
    with pytest.raises(BadAnswer):
        client.classify([b"first", b"second"])


@pytest.mark.parametrize(
    ("status", "kind"), [(429, Overloaded), (503, NotReady), (504, DeadlineExceeded)]
)
def test_a_balancers_own_answer_goes_by_its_status(make: Make, status, kind):
    steps = [httpx.Response(status, text="busy", headers={"retry-after": "1"})] * 2
    client, service, clock = make(*steps, retry=RetryPolicy(max_attempts=2))
    with pytest.raises(kind) as caught:
        client.classify(b"photo")
    assert caught.value.code == f"http_{status}"
    assert len(service.requests) == (1 if status == 504 else 2)
    assert all(wait >= 1.0 for wait in clock.slept)


def test_a_degraded_answer_is_one_unless_it_must_not_be(make: Make):
    more: dict[str, Any] = {"degraded": True, "missing_members": {"b": "late"}}
    client, _, _ = make(answered(**more))
    answer = client.classify(b"photo")
    assert (answer.degraded, answer.missing_members) == (True, {"b": "late"})
    client, service, _ = make(answered(**more), allow_degraded=False)
    with pytest.raises(Degraded, match=r"without b \(late\)") as caught:
        client.classify(b"photo")
    assert caught.value.answer == answer
    assert caught.value.request_id == "r1"
    assert len(service.requests) == 1


def test_a_key_is_shown_nowhere(make: Make, caplog):
    caplog.set_level(logging.DEBUG)
    client, _, _ = make(refused(401, "unauthorized", "no such key"), api_key=KEY)
    with pytest.raises(Unauthorized) as caught:
        client.classify(b"photo")
    shown = f"{client!r} {vars(client)} {caught.value!r} {caplog.text}"
    assert KEY not in shown
    with pytest.raises(ValueError, match="no header can carry") as refusal:
        Client("http://tandem", api_key=f"{KEY}\n")
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0},
        {"timeout": float("inf")},
        {"api_key": ""},
        {"api_key": "a b"},
        {"max_connections": 0},
    ],
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"timeout|key|max_connections"):
        Client("http://tandem", **wrong)


@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"priority": 8}, {"priority": -1}])
def test_a_call_that_makes_no_sense(make: Make, wrong):
    client, service, _ = make()
    with pytest.raises(ValueError, match=r"timeout|priority"):
        client.classify(b"photo", **wrong)
    assert service.requests == []


def test_answers_and_errors_go_through_pickle(make: Make):
    client, _, _ = make(answered(degraded=True, missing_members={"b": "late"}))
    answer = client.classify(b"photo")
    errors = [
        BadImage("m", "not_an_image", "r", 400),
        Overloaded("m", "overloaded", "r", 429, 2.0),
        Unreachable("m", "reset"),
        Degraded("m", answer),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert pickle.loads(pickle.dumps(answer)) == answer
