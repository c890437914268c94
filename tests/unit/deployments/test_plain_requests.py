"""Plain requests pass Serve's wrapper; what it would do for them is done, and what is not plain, or
comes while it has more to do, goes through it.
"""

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from ray.serve._private.logging_utils import log_access_log_filter
from ray.serve.context import _get_serve_request_context

from app.deployments import serve_replica as our_replica
from app.deployments.plain_requests import PlainRequests
from app.deployments.serve_replica import ServeReplica
from app.http.api import create_api
from app.http.direct import PATH, VERB
from app.tracing import spans
from app.tracing.request_span import RequestTracer
from app.tracing.spans import RecordedSpan
from tests.support.fakes import FakeService
from tests.support.raw_asgi import Asked, Told, ask
from tests.support.serve_replicas import made_replica

HAPROXYS = (b"x-request-disconnect-disabled", b"?1")
ID = (b"x-request-id", b"mine")
PLAIN = Asked(headers=[HAPROXYS, ID], chunks=(b"image",))


class Passing:
    """The middleware before an application that notes what comes through to it."""

    def __init__(self, service: FakeService, tracer: RequestTracer | None = None) -> None:
        self.replica = made_replica()
        self.passed_on: list[str] = []
        api = create_api(service)  # type: ignore[arg-type]
        assert api.direct is not None
        ours = ServeReplica(self.replica, VERB, PATH)  # type: ignore[arg-type]
        self.application = PlainRequests(self.through, ours, api.direct, tracer)
        self._api = api

    async def through(self, scope, receive, send) -> None:
        self.passed_on.append(scope["path"])
        await self._api(scope, receive, send)

    def ask(self, asked: Asked) -> Told:
        return ask(self.application, asked)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def passing(service: FakeService) -> Passing:
    return Passing(service)


@pytest.fixture(autouse=True)
def access_log(monkeypatch: pytest.MonkeyPatch) -> logging.Handler:
    """Serve's logger, as its replica has it with the access log off."""
    logger, handler = logging.Logger("serve"), logging.NullHandler()
    logger.propagate = False
    logger.addHandler(handler)
    handler.addFilter(log_access_log_filter)
    monkeypatch.setattr(our_replica, "logger", logger)
    return handler


def test_a_plain_request_passes_and_serve_knows_of_it(passing):
    told = passing.ask(PLAIN)
    assert (told.status, passing.passed_on) == (200, [])
    assert told.headers[b"x-request-id"] == b"mine"
    metrics = passing.replica._metrics_manager
    assert (metrics.num_ongoing, metrics.most_ongoing) == (0, 1)
    assert not passing.replica._semaphore._value
    assert metrics.requests == [{"route": PATH, "is_error": False, "exception_type": None}]
    (ingress,) = metrics.ingress
    assert (ingress["status_code"], ingress["is_error"]) == ("200", False)
    assert (ingress["app_name"], ingress["deployment_name"]) == ("tandem", "Gateway")


def test_who_sends_no_identity_gets_one_which_the_answer_has_too(passing):
    told = passing.ask(Asked(headers=[HAPROXYS], chunks=(b"image",)))
    identity = told.headers[b"x-request-id"]
    assert len(identity) == 36
    assert identity in told.body


@pytest.mark.parametrize(
    "asked",
    [
        Asked(headers=[HAPROXYS], query=b"x=1", chunks=(b"image",)),
        Asked(headers=[HAPROXYS], path="/v1/models", method="GET"),
        Asked(chunks=(b"image",)),  # not by our HAProxy: it may have headers of Serve's
        Asked(headers=[(HAPROXYS[0], b"?0")], chunks=(b"image",)),
    ],
)
def test_others_go_through_serves_wrapper(passing, asked):
    assert passing.ask(asked).status in (200, 422)
    assert passing.passed_on == [asked.path]
    assert not passing.replica._metrics_manager.requests


def test_without_a_place_serve_queues_it(passing):
    passing.replica._semaphore._value = 2
    assert passing.ask(PLAIN).status == 200
    assert passing.passed_on == [PATH]
    passing.replica._semaphore._value = 1
    passing.ask(PLAIN)
    assert passing.passed_on == [PATH]


def test_with_the_access_log_on_serve_writes_it(passing, access_log):
    access_log.removeFilter(log_access_log_filter)
    assert passing.ask(PLAIN).status == 200
    assert passing.passed_on == [PATH]


def test_a_bad_request_is_an_error_of_the_ingress_only(passing):
    assert passing.ask(Asked(headers=[HAPROXYS], chunks=(b"text",))).status == 400
    metrics = passing.replica._metrics_manager
    assert [told["is_error"] for told in metrics.requests] == [False]
    assert [(t["status_code"], t["is_error"]) for t in metrics.ingress] == [("400", True)]


def test_a_defect_is_answered_logged_and_counted(passing, service, caplog):
    service.raises = ValueError("a defect")
    with caplog.at_level(logging.ERROR, "ray.serve"):
        told = passing.ask(PLAIN)
    assert told.status == 500
    assert told.headers[b"x-request-id"] == b"mine"
    assert "Request failed." in caplog.text
    metrics = passing.replica._metrics_manager
    assert metrics.requests == [{"route": PATH, "is_error": True, "exception_type": "ValueError"}]
    assert [told["status_code"] for told in metrics.ingress] == ["500"]
    assert metrics.num_ongoing == passing.replica._semaphore._value == 0


@pytest.mark.parametrize("status", [200, 400, 500])
def test_the_answer_names_the_trace_whose_span_has_its_status(service, status, monkeypatch):
    ended: list[RecordedSpan] = []
    monkeypatch.setattr(spans, "outlets", [lambda recorded: ended.extend(recorded.spans())])
    if status == 500:
        service.raises = ValueError("a defect")
    tracer = RequestTracer(TracerProvider(), "request")
    body = b"text" if status == 400 else b"image"
    told = Passing(service, tracer).ask(Asked(headers=[HAPROXYS, ID], chunks=(body,)))
    (root,) = [span for span in ended if span.name == f"{VERB} {PATH}"]
    assert told.status == root.attributes["http.response.status_code"] == status
    assert told.headers[b"x-trace-id"].decode() == f"{root.own.trace_id:032x}"
    assert root.attributes["request_id"] == "mine"


def test_what_is_not_sampled_is_answered_without_a_trace(service):
    tracer = RequestTracer(TracerProvider(sampler=ALWAYS_OFF), "request")
    told = Passing(service, tracer).ask(PLAIN)
    assert told.status == 200
    assert b"x-trace-id" not in told.headers


async def test_a_cancelled_request_leaves_its_place_and_cancels_its_calls(passing):
    known: list[str] = []

    async def waits_for_ever(self, *_) -> None:
        known.append(_get_serve_request_context()._internal_request_id)
        await asyncio.Event().wait()

    passing.application._direct.answer = waits_for_ever.__get__(passing.application._direct)
    request = asyncio.create_task(passing.application(scope_of(PLAIN), None, None))
    await asyncio.sleep(0.01)
    metrics = passing.replica._metrics_manager
    assert metrics.num_ongoing == passing.replica._semaphore._value == 1
    request.cancel()
    await request  # ends here: Serve's wrapper does not hand it on either
    assert metrics.num_ongoing == passing.replica._semaphore._value == 0
    assert passing.replica.cancelled == known
    assert len(known[0]) == 32
    assert [told["status_code"] for told in metrics.ingress] == ["499"]
    assert [told["exception_type"] for told in metrics.requests] == ["CancelledError"]


def scope_of(asked: Asked) -> dict:
    return {
        "type": "http",
        "method": asked.method,
        "path": asked.path,
        "query_string": asked.query,
        "headers": list(asked.headers),
    }


async def test_calls_of_other_deployments_know_whose_they_are(passing):
    found = []

    async def looks(self, *_) -> None:
        found.append(_get_serve_request_context())

    passing.application._direct.answer = looks.__get__(passing.application._direct)
    await asyncio.create_task(passing.application(scope_of(PLAIN), None, None))
    assert (found[0].request_id, found[0].route, found[0].app_name) == ("mine", PATH, "tandem")
    assert found[0].cancel_on_parent_request_cancel
