"""Requests through the real interface: counted by route and status, whatever becomes of them."""

import asyncio

import httpx
import pytest

from app.errors import OverloadedError
from app.http.api import ObservedRequests
from app.metrics.table import REQUEST_MS, REQUESTS, STAGE_MS
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
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ObservedRequests(cancelled)({"type": "http"}, cancelled, cancelled)
    assert told.of(REQUESTS) == {("other", "499", "other"): 1}


async def test_without_metrics_requests_are_answered_all_the_same(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.post(URL, content=b"image")).status_code == 200
