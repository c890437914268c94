"""A call's time, whatever the service makes of each read and each write of it."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tandem_client import AsyncClient, Client, DeadlineExceeded
from tandem_client.exchange import CallOptions
from tandem_client.grpc_client import GrpcClient
from tests.support.scripted_service import Make, refused
from tests.support.trickling_service import MOST_S, Trickle, TricklingService

PHOTO, LARGE = b"photo", b"x" * 80_000_000
HTTP: list[Trickle] = ["upload", "headers", "body", "silence"]
Ask = Callable[[str, bytes, float], None]


def blocking(address: str, photo: bytes, timeout_s: float) -> None:
    with Client(f"http://{address}", timeout=timeout_s) as client:
        client.classify(photo)


def on_loop(address: str, photo: bytes, timeout_s: float) -> None:
    async def ask() -> None:
        async with AsyncClient(f"http://{address}", timeout=timeout_s) as client:
            await client.classify(photo)

    asyncio.run(ask())


def by_grpc(address: str, photo: bytes, timeout_s: float) -> None:
    with GrpcClient(address, timeout=timeout_s) as client:
        client.classify(photo)


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        *((ask, kind) for ask in (blocking, on_loop) for kind in HTTP),
        (by_grpc, "window"),
        (by_grpc, "silence"),
    ],
)
def test_a_call_ends_with_its_time(ask: Ask, kind: Trickle) -> None:
    photo, timeout_s = (LARGE, 2.0) if kind == "upload" else (PHOTO, 0.5)
    started = time.monotonic()
    with TricklingService(kind) as service:
        with pytest.raises(DeadlineExceeded, match=f"no answer within {timeout_s:g} s"):
            ask(service.address, photo, timeout_s)
        assert time.monotonic() - started < MOST_S / 3


@pytest.mark.parametrize("left_s", [1e-9, 0.0004, 0.0005, 0.001, 2.5])
def test_the_service_is_never_told_of_no_time(left_s: float) -> None:
    sent_s = float(CallOptions().headers(left_s)["x-request-timeout-seconds"])
    assert sent_s == pytest.approx(left_s, abs=0.001)
    assert sent_s > 0


def test_the_last_moment_of_a_call_is_told_as_one(make: Make) -> None:
    client, service, clock = make(refused(retry_after="1"))

    async def until_the_last_moment(_: float) -> None:
        clock.now = ends_at - 0.0003

    client._calls._sleep = until_the_last_moment  # type: ignore[assignment]
    ends_at = clock.now + 20
    client.classify(b"photo", timeout=20)
    assert [r.headers["x-request-timeout-seconds"] for r in service.requests] == ["20.000", "0.001"]


def test_a_client_that_is_closed_says_so(make: Make) -> None:
    client, service, _ = make()
    client.classify(b"photo")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed: make another"):
        client.classify(b"photo")
    assert len(service.requests) == 1
