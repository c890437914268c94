"""POST /v1/classify as raw ASGI: its query, its errors, and what is not of this route."""

import logging
from dataclasses import replace

import pytest

from app.errors import DeadlineError, OverloadedError
from app.http.api import create_api
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.raw_asgi import REQUESTS, STATUSES, Asked, ask

KEY = "k" * 32
ID = (b"x-request-id", b"r1")


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_gets_one_answer_with_its_identity(service, name):
    asked = REQUESTS[name]
    asked = replace(asked, headers=[*asked.headers, ID])
    answer = ask(create_api(service), asked)
    assert answer.status == STATUSES[name]
    assert b"r1" in answer.body


@pytest.mark.parametrize("error", [OverloadedError("full", 7), DeadlineError("late")])
def test_errors_of_the_whole_request_are_its_status(service, error):
    service.raises = error
    asked = Asked(headers=[ID], chunks=(b"image",))
    assert ask(create_api(service), asked).status == error.status


@pytest.mark.parametrize("header", [[], [(b"authorization", b"Bearer wrong")]])
def test_without_a_key_it_is_refused(tmp_path, header):
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    api = create_api(FakeService(Settings(api_keys_file=path)))
    asked = Asked(headers=[ID, *header], chunks=(b"image",))
    assert ask(api, asked).status == 401
    asked = Asked(headers=[ID, (b"authorization", b"Bearer " + KEY.encode())], chunks=(b"image",))
    assert ask(api, asked).status == 200


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


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        (b"top_k=x", 422, b"top_k is 'x'; give a whole number"),
        (b"top_k=2.5", 422, b"top_k is '2.5'"),
        (b"top_k=1_0", 422, b"top_k is '1_0'"),
        ("top_k=²".encode(), 422, b"top_k is "),
        (b"top_k=", 422, b"top_k is ''"),
        (b"top_k=-1", 422, b"top_k is -1; this model set has 10 classes"),
        (b"top_k=" + b"9" * 5000, 422, b"top_k is 999"),
        (b"threshold=x", 422, b"threshold is 'x'; give a number"),
        (b"threshold=0.5_0", 422, b"threshold is '0.5_0'; give a number"),
        (b"threshold=0.%D9%A5", 422, b"give a number"),  # a digit, but not of ASCII
        (b"threshold=0.5", 422, b"exclude each other"),
        (b"top_k=2&top_k=3", 200, b"image"),
        (b"top%5Fk=99", 422, b"top_k is 99"),
        (b"other=1", 200, b"image"),
    ],
)
def test_the_query(service, query, status, text):
    answer = ask(create_api(service), Asked(query=query, headers=[ID], chunks=(b"image",)))
    assert answer.status == status
    assert text in answer.body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/classify", 405), ("POST", "/v1/classify/", 404), ("GET", "/v1/models/", 404)],
)
def test_another_method_or_path_is_an_error_and_no_redirect(service, method, path, status):
    answer = ask(create_api(service), Asked(method=method, path=path, chunks=(b"image",)))
    assert answer.status == status
    assert b"location" not in dict(answer.headers or {})


def test_the_last_of_two_parameters_counts(service):
    ask(create_api(service), Asked(query=b"top_k=2&top_k=3", chunks=(b"image",)))
    assert service.requests[0].top_k == 3
