"""Unit tests start no cluster, and leave the environment as it was: Ray's workers inherit it."""

import gc
import os
from collections.abc import AsyncIterator, Iterator
from typing import NoReturn
from unittest.mock import patch

import httpx
import pytest
import ray

from app.http.api import create_api
from app.telemetry.metrics import Meter, meter
from tests.support.fakes import FakeService
from tests.support.http_server import PROXIES, FakeServer
from tests.support.instruments import Instruments


@pytest.fixture(autouse=True, scope="module")
def imported_objects_are_frozen() -> None:
    """Keep the collector from going through all modules again, a second each time.

    Some tests collect garbage, and Python itself does now and then.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield


# After the environment's fixture: monkeypatch may bring back a variable that a start has set, so
# it has to be undone first.
@pytest.fixture(autouse=True)
def no_cluster(same_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a unit test called ray.init; such a test belongs to integration/")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def told() -> Iterator[Instruments]:
    """Switch the process's meter on; this is what it tells Ray."""
    instruments = Instruments()
    meter.start(instruments.make)
    yield instruments
    meter.__dict__.update(Meter().__dict__)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """Return the proxy that this process's environment names for every scheme and host."""
    with FakeServer() as server:
        for name in PROXIES:
            monkeypatch.setenv(name, server.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    # As a server does: what the application lets through is logged, the client sees a 500.
    transport = httpx.ASGITransport(create_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
        yield client
