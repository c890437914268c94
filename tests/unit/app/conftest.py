"""The HTTP interface in this process, in front of a gateway that the test scripts."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fakes import FakeGateway
from http_server import FakeServer

from app.http_api import create_api


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    # As a server does: what the application lets through is logged, the client sees a 500.
    transport = httpx.ASGITransport(create_api(gateway), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
        yield client


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server
