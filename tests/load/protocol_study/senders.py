"""Sends requests by a way: over HTTP with aiohttp, over gRPC with its asyncio."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import numpy as np
import orjson

from app.grpc.open_inference_pb2 import ModelInferRequest
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from protocol_study.payloads import Payloads
from protocol_study.regions import Regions, in_shared_memory
from protocol_study.ways import (
    OUTPUT,
    Address,
    Sender,
    SendError,
    Way,
    Write,
    check_rows,
    http_form,
    http_raw,
    oip_binary,
    oip_json,
    tensor_of,
)
from tests.support.open_inference_stub import inference_stub

TIMEOUT_S = 30.0
MAX_MESSAGE = 64 * 2**20
OVER_HTTP: dict[str, Callable[[Payloads, Way, Address], Write]] = {
    "HTTP raw": http_raw,
    "HTTP form": http_form,
    "OIP REST binary": oip_binary,
    "OIP REST JSON": oip_json,
}
OVER_GRPC = ("tandem.v1 gRPC", "OIP gRPC")
SHARED_MEMORY = "shared memory"  # OIP over gRPC, whose tensors are in regions
PAYLOADS = {
    "HTTP raw": ("jpeg",),
    "HTTP form": ("jpeg",),
    "OIP REST binary": ("jpeg", "uint8"),
    "OIP REST JSON": ("uint8",),
    "tandem.v1 gRPC": ("jpeg",),
    "OIP gRPC": ("jpeg", "uint8"),
    SHARED_MEMORY: ("jpeg", "uint8"),
}


@contextlib.asynccontextmanager
async def sender(
    way: Way, address: Address, payloads: Payloads, places: int
) -> AsyncIterator[Sender]:
    """Yield what sends requests, up to ``places`` at a time."""
    if way.protocol in OVER_HTTP:
        async with _session(way, places) as session:
            write = OVER_HTTP[way.protocol](payloads, way, address)
            yield _HttpSender(session, address.url, write, way.batch)
        return
    async with _Channels(address.grpc, is_kept=way.is_kept) as channels:
        if way.protocol == SHARED_MEMORY:
            async with in_shared_memory(address, places, way, payloads) as regions:
                yield _RegionSender(channels, address.model, regions)
        else:
            message = _tandem if way.protocol == "tandem.v1 gRPC" else _open_inference
            yield _GrpcSender(channels, message(payloads, way, address), way.batch)


def _session(way: Way, places: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=places, force_close=not way.is_kept)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
    )


class _HttpSender:
    def __init__(self, session: aiohttp.ClientSession, url: str, write: Write, batch: int) -> None:
        self._session, self._url, self._write, self._batch = session, url, write, batch

    async def __call__(self, number: int) -> None:
        path, body, headers = self._write(number)
        try:
            async with self._session.post(self._url + path, data=body, headers=headers) as answer:
                told = await answer.read()
        except TimeoutError as error:
            raise SendError("timeout") from error
        except aiohttp.ClientError as error:
            raise SendError(type(error).__name__, str(error)) from error
        if answer.status != 200:
            raise SendError(f"http_{answer.status}", told[:500].decode(errors="replace"))
        if path.startswith("/v2"):
            _check_tensors(told, answer.headers, self._batch)


def _check_tensors(told: bytes, headers: Any, batch: int) -> None:
    length = headers.get("Inference-Header-Content-Length")
    if length is not None:
        return check_rows(told[int(length) :], batch)
    rows = orjson.loads(told)["outputs"][0]["data"]
    return check_rows(np.array(rows, "<f4").tobytes(), batch)


class _Channels:
    """One channel that all requests share, or one for each."""

    def __init__(self, address: str, *, is_kept: bool) -> None:
        self._address, self._kept = address, self._opened(address) if is_kept else None

    def _opened(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[grpc.aio.Channel]:
        if self._kept is not None:
            yield self._kept
            return
        async with self._opened(self._address) as channel:
            yield channel

    async def __aenter__(self) -> "_Channels":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._kept is not None:
            await self._kept.close()


Ask = Callable[[grpc.aio.Channel, int], Any]  # awaits the answer's rows, or None


class _GrpcSender:
    def __init__(self, channels: _Channels, ask: Ask, batch: int) -> None:
        self._channels, self._ask, self._batch = channels, ask, batch

    async def __call__(self, number: int) -> None:
        try:
            async with self._channels.one() as channel:
                rows = await self._ask(channel, number)
        except grpc.aio.AioRpcError as error:
            raise SendError(error.code().name, error.details() or "") from error
        if rows is not None:
            check_rows(rows, self._batch)


def _tandem(payloads: Payloads, way: Way, address: Address) -> Ask:
    async def ask(channel: grpc.aio.Channel, number: int) -> None:
        request = ClassifyRequest(images=payloads.files_of(number, way.batch), top_k=1)
        answer = await EnsembleStub(channel).Classify(request, timeout=TIMEOUT_S)
        for result in answer.results:
            if not result.HasField("classified"):
                raise SendError(result.error.code, result.error.message)

    return ask


def _open_inference(payloads: Payloads, way: Way, address: Address) -> Ask:
    async def ask(channel: grpc.aio.Channel, number: int) -> bytes:
        name, datatype, shape, raw = tensor_of(payloads, way, number)
        request = ModelInferRequest(model_name=address.model, raw_input_contents=[raw])
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.outputs.add(name=OUTPUT)
        stub = inference_stub(channel)
        answer = await stub.ModelInfer(request, timeout=TIMEOUT_S)
        rows: bytes = answer.raw_output_contents[0]
        return rows

    return ask


class _RegionSender:
    """Puts the tensors into a region that no other request uses, and reads the rows from it."""

    def __init__(self, channels: _Channels, model: str, regions: Regions) -> None:
        self._channels, self._model, self._regions = channels, model, regions

    async def __call__(self, number: int) -> None:
        async with self._regions.one() as region:
            request = region.request(self._model, number)
            try:
                async with self._channels.one() as channel:
                    await inference_stub(channel).ModelInfer(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise SendError(error.code().name, error.details() or "") from error
            region.check()
