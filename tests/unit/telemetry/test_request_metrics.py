"""Requests through the real interface, counted whatever becomes of them, and what is answered."""

import asyncio
from typing import Any

import httpx
import pytest

from app.errors import OverloadedError
from app.http.api import ObservedRequests
from app.telemetry.metric_table import ANSWERS, ENTROPY, REQUEST_MS, REQUESTS, SKIPPED, STAGE_MS
from app.telemetry.metrics import record_answers, stage_tags
from tests.support.answers import VERSION, answer_of
from tests.support.fakes import FakeService
from tests.support.instruments import Instruments

URL = "/v1/classify"


async def test_a_good_request(told: Instruments, client: httpx.AsyncClient) -> None:
    assert (await client.post(URL, content=b"image")).status_code == 200
    assert told.of(REQUESTS) == {(URL, "200", "classify"): 1}
    assert told.observed(REQUEST_MS) == {("200",): 1}
    assert told.observed(STAGE_MS) == {("encode", "none"): 1}  # the graph is a fake
    (total_ms,) = told.of(REQUEST_MS.parts[1]).values()
    (encode_ms,) = told.of(STAGE_MS.parts[1]).values()
    assert 0 < encode_ms < total_ms


@pytest.mark.parametrize(
    ("error", "status"), [(OverloadedError("full"), "429"), (ValueError("a bug"), "500")]
)
async def test_a_request_that_fails(
    told: Instruments,
    client: httpx.AsyncClient,
    service: FakeService,
    error: Exception,
    status: str,
) -> None:
    service.raises = error
    assert (await client.post(URL, content=b"image")).status_code == int(status)
    assert told.of(REQUESTS) == {(URL, status, "classify"): 1}


async def test_paths_that_are_no_route_are_one(
    told: Instruments, client: httpx.AsyncClient
) -> None:
    for path in ("/wp-admin", "/.env", "/v1/nothing"):
        await client.get(path)
    await client.get("/healthz")
    assert told.of(REQUESTS) == {
        ("other", "404", "other"): 3,
        ("/healthz", "200", "other"): 1,
    }
    assert told.observed(REQUEST_MS) == {}  # only photos are measured


async def test_a_client_that_goes_away(told: Instruments) -> None:
    async def cancelled(*_: object) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ObservedRequests(cancelled)({"type": "http"}, cancelled, cancelled)
    assert told.of(REQUESTS) == {("other", "499", "other"): 1}


async def test_without_metrics_requests_are_answered_all_the_same(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.post(URL, content=b"image")).status_code == 200


def test_durations_are_observed_by_stage_and_member(told: Instruments) -> None:
    durations = [(stage_tags("read", None), 2.0), (stage_tags("infer", "a"), 3.0)]
    record_answers([answer_of()], 0.1, durations)
    assert told.observed(STAGE_MS) == {("read", "none"): 1, ("infer", "a"): 1}


def test_agreement_and_degraded_answers(told: Instruments) -> None:
    answers = [
        answer_of(),
        answer_of(sure=True),
        answer_of(agreement=False, sure=False),
        answer_of("a", degraded=True),
    ]
    record_answers(answers, 0.0, [])
    assert told.of(ANSWERS) == {
        ("yes", "no", "unknown", VERSION): 1,
        ("yes", "no", "yes", VERSION): 1,
        ("no", "no", "no", VERSION): 1,
        ("alone", "yes", "unknown", VERSION): 1,
    }


def test_skipped_members(told: Instruments) -> None:
    record_answers([answer_of("a", skipped="bc"), answer_of("a", skipped="b")], 0.0, [])
    assert told.of(SKIPPED) == {("b",): 2, ("c",): 1}
    assert told.of(ANSWERS) == {("alone", "no", "unknown", VERSION): 2}


def test_entropy_is_summed(told: Instruments) -> None:
    record_answers([answer_of(), answer_of()], 0.75, [])
    assert told.of(ENTROPY) == {(): 0.75}
