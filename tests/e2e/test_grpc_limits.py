"""gRPC clients that mean harm: large messages without a key, messages that never end.

In the fast tier: tests/integration/test_haproxy_grpc_limits.py with the real HAProxy, and the
Gateway's part in tests/unit/grpc/test_servicer.py, test_receiver.py and test_room.py.
"""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import psutil
import pytest

from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.services.live_service import Service, drawn_photo
from tests.support.services.processes import replicas, wait_until

pytestmark = pytest.mark.slow
KEY = "k" * 32
WITH_KEY = (("authorization", f"Bearer {KEY}"),)
LARGE = ClassifyRequest(images=[bytes(18 * 2**20)])
NUM_LARGE = 24
CODE = grpc.StatusCode
NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def port(grpc_port) -> int:
    return grpc_port


@pytest.fixture(scope="module")
def guarded(start_service, tmp_path_factory, port) -> Service:
    """A service that wants a key."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(KEY, "ascii")
    keys.chmod(0o600)
    service = start_service("--grpc-port", str(port), "--api-keys-file", str(keys))

    def wants_a_key() -> bool:
        return asyncio.run(send(port, ClassifyRequest()))[0] is CODE.UNAUTHENTICATED

    wait_until(wants_a_key, 120, "HAProxy finds the Gateway's gRPC server a moment after HTTP's")
    return service


async def send(
    port: int, request: ClassifyRequest, metadata: tuple[tuple[str, str], ...] = (), **options
) -> tuple[grpc.StatusCode, str]:
    """Return the call's status and error code on a connection of its own."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NO_LIMIT) as channel:
        try:
            await EnsembleStub(channel).Classify(request, metadata=metadata, timeout=60, **options)
        except grpc.aio.AioRpcError as error:
            return error.code(), str(dict(error.trailing_metadata()).get("error-code"))
        return CODE.OK, ""


def test_large_messages_without_a_key_take_no_memory(guarded, port):
    gateway = psutil.Process(replicas(guarded.process.pid)["Gateway"])

    async def flood() -> Counter[tuple[grpc.StatusCode, str]]:
        return Counter(await asyncio.gather(*(send(port, LARGE) for _ in range(NUM_LARGE))))

    async def watched() -> tuple[Counter[tuple[grpc.StatusCode, str]], int]:
        flooding, most = asyncio.create_task(flood()), 0
        while not flooding.done():
            most = max(most, gateway.memory_info().rss)
            await asyncio.sleep(0.02)  # a sample, not a wait
        return await flooding, most

    asyncio.run(send(port, ClassifyRequest(images=[drawn_photo()]), WITH_KEY))
    before = gateway.memory_info().rss
    ends, most = asyncio.run(watched())
    assert ends == {(CODE.UNAUTHENTICATED, "unauthorized"): NUM_LARGE}
    assert most - before < 4 * len(LARGE.images[0])  # of 24


def test_large_messages_with_a_key_are_answered(guarded, port):
    """No more of them at a time than there is room for; what is no image is no call's error."""
    for compression in (None, grpc.Compression.Gzip):
        answer = asyncio.run(send(port, LARGE, WITH_KEY, compression=compression))
        assert answer == (CODE.OK, "")
