"""Unit tests start no cluster, and leave the environment as it was: Ray's workers inherit it."""

import gc
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
import ray
from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS

from app.environment import HA_PROXY
from app.grpc.call import normal_form
from app.http.api import create_api
from app.telemetry.metrics import Meter, meter
from tests.support.asgi_client import asgi_client
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


@pytest.fixture(autouse=True)
def same_grpc_options() -> Iterator[None]:
    """Give Serve its options back, which each Gateway that a test makes sets for its process."""
    before = [*DEFAULT_GRPC_SERVER_OPTIONS]
    yield
    DEFAULT_GRPC_SERVER_OPTIONS[:] = before


# After the environment's fixture: monkeypatch may bring back a variable that a start has set, so
# it has to be undone first.
@pytest.fixture(autouse=True)
def no_cluster(same_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("a unit test called ray.init; such a test belongs to integration/")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def behind_haproxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let internal headers be believed, as on a cluster, whose HAProxy has no secret."""
    monkeypatch.setenv(HA_PROXY, "1")
    normal_form.cache_clear()
    yield
    normal_form.cache_clear()


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A folder that all users can write to, as /tmp, with a name as short as a run's place."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who can start a process of another user")
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture
def neighbour(shared_place: Path) -> Callable[[str], None]:
    """Let another user run lines of shell in the shared place."""

    def run(lines: str) -> None:
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-ec", lines]
        subprocess.run(words, cwd=shared_place, check=True)

    return run


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
    async with asgi_client(create_api(service), raise_app_exceptions=False) as client:
        yield client
