"""Regions of shared memory that the service knows, for requests that are under way."""

import asyncio
import contextlib
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc

from app.grpc.open_inference_pb2 import (
    ModelInferRequest,
    SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryUnregisterRequest,
)
from protocol_study.payloads import Payloads
from protocol_study.ways import OUTPUT, Address, Way, check_rows, tensor_of
from tests.support.open_inference_stub import inference_stub

FOLDER = Path("/dev/shm")
MAX_ROWS_BYTES = 64 * 4096 * 4  # of the probabilities


class Region:
    """A file of shared memory: the input first, behind it the rows of the answer."""

    def __init__(self, name: str, way: Way, payloads: Payloads) -> None:
        self.name, self._way, self._payloads = name, way, payloads
        everything = range(len(payloads.files))
        largest = max(len(tensor_of(payloads, way, number)[3]) for number in everything)
        self.input_bytes, self.size = largest, largest + MAX_ROWS_BYTES
        with (FOLDER / name).open("x+b") as file:
            os.ftruncate(file.fileno(), self.size)
            self._memory = mmap.mmap(file.fileno(), self.size)

    def request(self, model: str, number: int) -> ModelInferRequest:
        """Write the input of the ``number``-th request; return the message that points at it."""
        name, datatype, shape, raw = tensor_of(self._payloads, self._way, number)
        self._memory[: len(raw)] = raw
        message = ModelInferRequest(model_name=model)
        given = message.inputs.add(name=name, datatype=datatype, shape=shape)
        asked = message.outputs.add(name=OUTPUT)
        for tensor, offset, size in (
            (given, 0, len(raw)),
            (asked, self.input_bytes, MAX_ROWS_BYTES),
        ):
            tensor.parameters["shared_memory_region"].string_param = self.name
            tensor.parameters["shared_memory_offset"].int64_param = offset
            tensor.parameters["shared_memory_byte_size"].int64_param = size
        return message

    def check(self) -> None:
        """Raise SendError unless the rows of an answer are there; then take them away."""
        end = self.input_bytes + self._way.batch * self._payloads.num_classes * 4
        check_rows(self._memory[self.input_bytes : end], self._way.batch)
        self._memory[self.input_bytes : end] = bytes(end - self.input_bytes)

    def close(self) -> None:
        self._memory.close()
        (FOLDER / self.name).unlink()


class Regions:
    """As many regions as requests may be under way."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._free: asyncio.LifoQueue[Region] = asyncio.LifoQueue()
        for region in regions:
            self._free.put_nowait(region)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Region]:
        """Wait for a region that nobody uses."""
        region = await self._free.get()
        try:
            yield region
        finally:
            self._free.put_nowait(region)


@contextlib.asynccontextmanager
async def in_shared_memory(
    address: Address, places: int, way: Way, payloads: Payloads
) -> AsyncIterator[Regions]:
    """Make and register ``places`` regions; take them away at the end."""
    regions: list[Region] = []
    async with grpc.aio.insecure_channel(address.grpc) as channel:
        stub = inference_stub(channel)
        try:
            for place in range(places):
                region = Region(f"tandem-study-{os.getpid()}-{place}", way, payloads)
                regions.append(region)
                await stub.SystemSharedMemoryRegister(
                    SystemSharedMemoryRegisterRequest(
                        name=region.name, key=f"/{region.name}", byte_size=region.size
                    )
                )
            yield Regions(regions)
        finally:
            for region in regions:
                region.close()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.SystemSharedMemoryUnregister(
                        SystemSharedMemoryUnregisterRequest(name=region.name)
                    )
