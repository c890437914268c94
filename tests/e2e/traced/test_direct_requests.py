"""Requests that pass Serve's wrapper and requests that go through it: nobody can tell them apart.

A parameter that nobody knows, ``x``, changes no answer and makes a request one that is not plain.
"""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.services.live_service import Service
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.trace_checks import ROOT, by_trace, check_whole, label, num_whole
from tests.support.trace_receivers import OtlpGrpc, Received

PLAIN, WRAPPED = {"top_k": "3"}, {"top_k": "3", "x": "1"}
MEMBERS = ("resnet50", "densenet169")
OWN = ("request_id", "timings_ms")  # of each request
# Of the deployment, and of what comes from outside, which HAProxy tells by Serve's default.
SERVES_COUNTERS = "ray_serve_deployment_request_counter_total", "ray_serve_num_http_requests_total"
OUR_COUNTER, ROUTE = "ray_tandem_requests_total", "/v1/classify"


@pytest.fixture
def ask(traced: Service) -> Callable[..., httpx.Response]:
    def ask(body: bytes, query: dict[str, str], **headers: str) -> httpx.Response:
        url = f"{traced.url}/v1/classify"
        return httpx.post(url, content=body, params=query, headers=headers, timeout=60)

    return ask


def root_of(answer: httpx.Response, receiver: OtlpGrpc) -> tuple[Received, list[str]]:
    """Wait for a request's trace; return its root and the names of its spans."""
    trace_id = answer.headers["x-trace-id"]

    def is_whole(spans: list[Received]) -> bool:
        found = by_trace(spans).get(trace_id, [])
        if answer.status_code == 200:
            return num_whole(found, MEMBERS) == 1
        return any(span.name == ROOT for span in found)

    receiver.wait_for(is_whole)
    spans = by_trace(receiver.spans)[trace_id]
    return check_whole(spans), sorted(map(label, spans))


def test_answers_are_the_same(ask: Callable[..., httpx.Response], photo: bytes) -> None:
    identity = {"X-Request-ID": "mine"}
    for body in (photo, b"no image"):
        plain, wrapped = (ask(body, query, **identity) for query in (PLAIN, WRAPPED))
        assert plain.status_code == wrapped.status_code
        assert header_names(plain) == header_names(wrapped)
        assert plain.headers["x-request-id"] == wrapped.headers["x-request-id"] == "mine"
        assert shared(plain) == shared(wrapped)


def shared(answer: httpx.Response) -> dict[str, Any]:
    return {name: value for name, value in answer.json().items() if name not in OWN}


def header_names(answer: httpx.Response) -> list[str]:
    return [name for name, _ in answer.headers.multi_items()]


@pytest.mark.parametrize("is_image", [True, False])
def test_their_spans_are_the_same(
    receiver: OtlpGrpc, ask: Callable[..., httpx.Response], photo: bytes, is_image: bool
) -> None:
    body = photo if is_image else b"no image"
    identity = {"X-Request-ID": "mine"}
    (plain, names), (wrapped, others) = (
        root_of(ask(body, query, **identity), receiver) for query in (PLAIN, WRAPPED)
    )
    assert names == others
    assert plain.attributes["request_id"] == "mine"
    for of_span in ("name", "kind", "resource", "attributes"):
        assert getattr(plain, of_span) == getattr(wrapped, of_span)


def test_only_plain_ones_pass(
    ask: Callable[..., httpx.Response], receiver: OtlpGrpc, photo: bytes
) -> None:
    """Serve's spans are of the SDK, whose exporter names who made them."""
    plain, wrapped = (root_of(ask(photo, query), receiver)[0] for query in (PLAIN, WRAPPED))
    assert plain.scope == "tandem"
    assert wrapped.scope != "tandem"


def test_serve_counts_both(
    traced: Service, ask: Callable[..., httpx.Response], photo: bytes
) -> None:
    """As often as we count them, whose number does not know the ways apart."""
    for query in (PLAIN, WRAPPED, PLAIN):
        assert ask(photo, query).status_code == 200

    def is_same() -> bool:
        ours, *serves = (counted(traced, name) for name in (OUR_COUNTER, *SERVES_COUNTERS))
        return ours >= 3 and serves == [ours, ours]

    wait_until(is_same, EVENTUALLY_S, "the same number in all counters")


def counted(service: Service, counter: str) -> float:
    """Return how many requests of the route a counter has."""
    address = re.search(r"metrics: (http://\S+/metrics)", service.log.read_text())
    assert address
    text = httpx.get(address[1], timeout=10).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == counter and s.labels["route"] == ROUTE)
