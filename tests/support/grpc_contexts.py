"""What Serve hands a gRPC method: the call's messages, and its own context of the call."""

import asyncio
from collections.abc import AsyncIterator

from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.grpc.call import Message


class _Underlying:
    """Grpcio's context of a call, as far as Serve's reads it."""

    def __init__(self, metadata: dict[str, str | bytes], peer: str | None) -> None:
        self._metadata, self._peer = tuple(metadata.items()), peer

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str | None:
        return self._peer

    def nothing(self) -> None:
        return None

    auth_context = code = details = peer_identities = peer_identity_key = nothing


def context_of(request_id="r1", peer=None, **metadata):
    """Return the context of a call; underscores in names stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in metadata.items()}
    context = RayServegRPCContext(_Underlying(named, peer))
    context.set_trailing_metadata([("request_id", request_id)])  # as Serve does at once
    return context


def stream_of(*messages: bytes) -> gRPCInputStream[Message]:
    async def iterate() -> AsyncIterator[Message]:
        for message in messages:
            yield Message(message)

    return gRPCInputStream(iterate())


def stalled_stream() -> gRPCInputStream[Message]:
    async def iterate() -> AsyncIterator[Message]:
        await asyncio.Future()
        yield Message(b"")

    return gRPCInputStream(iterate())
