"""A plain request of POST /v1/classify gets the same answer past FastAPI as through it."""

import logging

import pytest
from fastapi import FastAPI

from app.errors import DeadlineError, OverloadedError
from app.http.api import create_api
from app.http.direct import TandemAPI
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.raw_asgi import Asked, Told, ask

KEY = "k" * 32
ID = (b"x-request-id", b"r1")
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="1"\r\n\r\nimage one\r\n'
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="2"\r\n\r\ntext\r\n--b--\r\n'
)
REQUESTS = {
    "image": Asked(chunks=(b"image", b" in two")),
    "top_k": Asked(query=b"top_k=3", chunks=(b"image",)),
    "top_k too large": Asked(query=b"top_k=9999", chunks=(b"image",)),
    "no image": Asked(chunks=(b"text",)),
    "form": Asked(headers=[(b"content-type", b"multipart/form-data; boundary=b")], chunks=(FORM,)),
    "broken form": Asked(headers=[(b"content-type", b"multipart/form-data")], chunks=(FORM,)),
    "too long": Asked(chunks=(bytes(5000),)),
    "hangs up": Asked(chunks=(b"ima",), hangs_up=True),
    "bad timeout": Asked(headers=[(b"x-request-timeout-seconds", b"x")], chunks=(b"image",)),
    "bad priority": Asked(headers=[(b"priority", b"u=9")], chunks=(b"image",)),
}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


def both_answers(service: FakeService, asked: Asked) -> tuple[Told, Told]:
    """Return what comes past FastAPI, and what comes through it."""
    api = create_api(service)  # type: ignore[arg-type]
    assert api.direct is not None
    calls: list[Asked] = []
    direct = api.direct.answer

    async def noted(*args) -> None:
        calls.append(asked)
        await direct(*args)

    api.direct.answer = noted  # type: ignore[method-assign]

    async def through(scope, receive, send) -> None:
        await FastAPI.__call__(api, scope, receive, send)

    past = ask(api, asked)
    assert calls == [asked], "it went past FastAPI"
    return past, ask(through, asked)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answers_are_the_same_byte_for_byte(service, name):
    asked = REQUESTS[name]
    asked = Asked(asked.method, asked.path, asked.query, [*asked.headers, ID], asked.chunks)
    past, through = both_answers(service, asked)
    assert past == through
    assert past.status != 0


@pytest.mark.parametrize("error", [OverloadedError("full", 7), DeadlineError("late")])
def test_errors_of_the_whole_request_are_the_same(service, error):
    service.raises = error
    past, through = both_answers(service, Asked(headers=[ID], chunks=(b"image",)))
    assert past == through
    assert past.status == error.status


@pytest.mark.parametrize("header", [[], [(b"authorization", b"Bearer wrong")]])
def test_refusals_of_keys_are_the_same(tmp_path, header):
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    service = FakeService(Settings(api_keys_file=path))
    past, through = both_answers(service, Asked(headers=[ID, *header], chunks=(b"image",)))
    assert past == through
    assert past.status == 401
    asked = Asked(headers=[ID, (b"authorization", b"Bearer " + KEY.encode())], chunks=(b"image",))
    past, through = both_answers(service, asked)
    assert past == through
    assert past.status == 200


def test_an_error_of_ours_is_answered_logged_and_raised(service, caplog):
    service.raises = ValueError("a defect")
    told: list[Told] = []
    api = create_api(service)  # type: ignore[arg-type]

    async def caught(scope, receive, send) -> None:
        with pytest.raises(ValueError, match="a defect"):
            await api(scope, receive, send)

    with caplog.at_level(logging.ERROR):
        queries = (b"", b"x=1")
        told = [ask(caught, Asked(headers=[ID], chunks=(b"image",), query=q)) for q in queries]
    assert told[0] == told[1]
    assert told[0].status == 500
    assert caplog.text.count("request r1 failed") == 2


@pytest.mark.parametrize(
    "asked",
    [
        Asked(query=b"top_k=x", chunks=(b"image",)),
        Asked(query=b"top_k=2&top_k=3", chunks=(b"image",)),
        Asked(method="GET"),
        Asked(path="/v1/models", method="GET"),
        Asked(path="/v1/classify/", chunks=(b"image",)),
    ],
)
def test_what_is_not_plain_is_left_to_fastapi(service, asked):
    api = create_api(service)  # type: ignore[arg-type]
    assert isinstance(api, TandemAPI)
    api.direct = None
    through = ask(api, asked)
    assert ask(create_api(service), asked).status == through.status  # type: ignore[arg-type]
