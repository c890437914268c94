"""Triton's shared memory extensions over gRPC, and which calls come from this machine."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.errors import BadRegionError
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import GrpcCall
from app.grpc.servicer import Message
from app.oip.shared_memory import NO_CUDA, SharedMemory, asks_for_itself, is_loopback

Stream = gRPCInputStream[Message]
Answer = Callable[[Any], Awaitable[Any]]


def is_local(call: GrpcCall) -> bool:
    """Whether a call is known to come from a program on this machine.

    Its peer may be HAProxy, which listens on loopback then (:mod:`app.launch.front`).
    """
    return is_loopback_peer(call.peer) and asks_for_itself(call.joined)


def is_loopback_peer(peer: str) -> bool:
    """Whether a peer, as gRPC writes it, has an address of this machine."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return False
    address, _, _ = unquote(rest).rpartition(":")
    return is_loopback(address.removeprefix("[").removesuffix("]"))


class RegionCalls:
    """Answers the methods with the regions of ``memory``."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def of(self, method: str, call: GrpcCall) -> tuple[type[Any], Answer]:
        """Return the message that a method takes, and what answers it."""

        async def answer(request: Any) -> Any:
            kind, _, verb = method.partition("SharedMemory")
            if kind == "Cuda":
                return self._of_cuda(verb)
            return self._of_system(verb, request, call)

        return getattr(messages, f"{method}Request"), answer

    def _of_system(self, verb: str, request: Any, call: GrpcCall) -> Any:
        regions = self._memory.for_caller(is_local=is_local(call))
        if verb == "Status":
            reply = messages.SystemSharedMemoryStatusResponse()
            for one in regions.status(request.name):
                region = reply.RegionStatus(**asdict(one))
                reply.regions[one.name].CopyFrom(region)
            return reply
        if verb == "Register":
            regions.register(request.name, request.key, request.offset, request.byte_size)
            return messages.SystemSharedMemoryRegisterResponse()
        regions.unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    def _of_cuda(self, verb: str) -> Any:
        """Say that there are none; clients clean up before they begin."""
        if verb == "Register":
            raise BadRegionError(NO_CUDA)
        return getattr(messages, f"CudaSharedMemory{verb}Response")()


class SharedMemoryMethods:
    """The methods as the ingress has them: Serve finds each, and ``grpc_context``, by its name."""

    _open_inference: Any  # app.grpc.open_inference.OpenInferenceInterface

    async def SystemSharedMemoryStatus(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Describe the registered regions."""
        return await self._open_inference.call("SystemSharedMemoryStatus", incoming, grpc_context)

    async def SystemSharedMemoryRegister(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Register a file of /dev/shm, or a part of one."""
        return await self._open_inference.call("SystemSharedMemoryRegister", incoming, grpc_context)

    async def SystemSharedMemoryUnregister(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Forget a region, or all."""
        return await self._open_inference.call(
            "SystemSharedMemoryUnregister", incoming, grpc_context
        )

    async def CudaSharedMemoryStatus(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Say that there are no such regions."""
        return await self._open_inference.call("CudaSharedMemoryStatus", incoming, grpc_context)

    async def CudaSharedMemoryRegister(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Refuse it: the networks run on CPUs."""
        return await self._open_inference.call("CudaSharedMemoryRegister", incoming, grpc_context)

    async def CudaSharedMemoryUnregister(
        self, incoming: Stream, grpc_context: RayServegRPCContext
    ) -> Any:
        """Have nothing to forget."""
        return await self._open_inference.call("CudaSharedMemoryUnregister", incoming, grpc_context)
