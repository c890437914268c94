"""Clients that send a photo and go away: the service does not run it for them."""

import asyncio
from collections.abc import Callable

from tests.support.services.live_service import Service
from tests.support.trace_checks import batches
from tests.support.trace_receivers import OtlpGrpc

NUM_GONE = 120  # nearly all places: no machine answers half of them while they leave


def test_a_client_that_goes_away_stops_costing(
    traced: Service, emptied: OtlpGrpc, wait_for_spans: Callable[[], None], photo: bytes
) -> None:
    asyncio.run(send_and_leave(traced.port, photo))
    wait_for_spans()  # after an answer
    sizes = [span.attributes["tandem.batch_size"] for span in batches(emptied.spans).values()]
    assert 0 < sum(sizes) < NUM_GONE, f"of {NUM_GONE} photos, each for two members"


async def send_and_leave(port: int, photo: bytes) -> None:
    head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo)}\r\n\r\n"
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_GONE))
    )

    async def leave(writer: asyncio.StreamWriter) -> None:
        """Go away a moment after the photo, whatever the others are at."""
        writer.write(head.encode() + photo)
        await writer.drain()
        await asyncio.sleep(0.1)  # it has arrived
        writer.transport.abort()

    await asyncio.gather(*(leave(writer) for _, writer in opened))
