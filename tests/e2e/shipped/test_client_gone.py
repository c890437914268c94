"""Clients that send a photo and go away: the service does not run it for them.

``make test`` has tests/unit/http/test_classify.py.
"""

import asyncio

import pytest

from tests.support.services.processes import EVENTUALLY_S
from tests.support.trace_checks import batches

pytestmark = pytest.mark.slow

NUM_GONE, NUM_FILES = 60, 8  # images for seconds: no machine has answered half of them at once
HEAD = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="files"; filename="f"\r\n\r\n'


def test_a_client_that_goes_away_stops_costing(service, emptied, wait_for_spans, photo):
    asyncio.run(send_and_leave(service.port, photo))
    wait_for_spans()  # after an answer
    sizes = [span.attributes["tandem.batch_size"] for span in batches(emptied.spans).values()]
    num_images = NUM_GONE * NUM_FILES
    assert 0 < sum(sizes) < num_images, f"of {num_images} photos, each for two members"


async def send_and_leave(port: int, photo: bytes) -> None:
    """Send forms on connections of their own; when the first is answered, all go away."""
    body = (PART + photo + b"\r\n") * NUM_FILES + b"--b--\r\n"
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_GONE))
    )
    for _, writer in opened:
        writer.write(request)
    answers = [asyncio.create_task(reader.readline()) for reader, _ in opened]
    async with asyncio.timeout(EVENTUALLY_S):
        first = await next(asyncio.as_completed(answers))
    for _, writer in opened:
        writer.transport.abort()
    await asyncio.gather(*answers, return_exceptions=True)
    assert b" 200 " in first
