"""Receives the messages of calls, and answers the services that are of no other protocol.

A receiver limits the memory of messages under way.

``Ensemble.Classify`` answers images. ``grpc.health.v1`` is for Kubernetes and load balancers. It
has only ``Check``: clients take a server without ``Watch`` for a serving one, by the protocol, and
a ``Watch`` call never ends, so it would delay a replica that stops. Reflection is there as
``grpc.reflection.v1``, which clients try first; grpcio has only v1alpha. The messages of both are
equal on the wire, so v1alpha's servicer answers both.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.answers import Classified, Fault, as_values
from app.environment import KIB, MIB
from app.errors import (
    IN_A_SECOND,
    MAX_SHOWN,
    BadParameterError,
    BodyTooLargeError,
    ClientGoneError,
    OverloadedError,
    SlowBodyError,
    UnknownModelError,
)
from app.graph.request import RequestBody, parsed_regions
from app.graph.service import EnsembleService
from app.grpc import tandem_pb2 as messages
from app.grpc.call import (
    CHECK,
    HEALTH,
    METHOD,
    OPEN_INFERENCE,
    SERVICE,
    TENSORFLOW_METHODS,
    GrpcCall,
    Message,
    answered,
    images_of,
    number_of,
    parsed,
)
from app.oip.inference import LONG_BYTES
from app.queueing.admission import Share, Uploads
from app.setting_groups import LimitSettings
from app.telemetry.metrics import RequestObserver
from models.errors import TandemError

Parsed = TypeVar("Parsed")
# On a cluster HAProxy gives up on a Gateway that reads nothing of a request for 5 s.
WAIT_AT_MOST_S = 2.0
MARGIN_BYTES = MIB  # for a message's field headers, and some tolerance
GRPC_MOST_BYTES = 2**31 - 1  # of its option, a C int
# For questions about the server, a model or a region, whose names have some hundred bytes.
SHORT_BYTES = 16 * KIB
SHORT_PLACES = 64  # of the 512 places that Serve has for all calls under way
SHORT_WITHIN_S = 2.0
SHORT_IS_SLOW_AFTER_S = 0.1  # then it may lose its place; its bytes fit into one packet
# A message that is still to come (:func:`app.grpc.call.add_servicer`), or with the generated
# function one that was received before the call.
Incoming = gRPCInputStream[Message] | messages.ClassifyRequest
# "" is the server as a whole.
NAMES = ("", SERVICE, OPEN_INFERENCE, *dict.fromkeys(TENSORFLOW_METHODS.values()))


class GrpcInterface:
    """Answers ``Classify`` calls with ``service``; other interfaces may share ``receiver``."""

    def __init__(self, service: EnsembleService, receiver: "Receiver | None" = None) -> None:
        self._service, self._receiver = service, receiver or Receiver(service.settings)

    async def classify(
        self, incoming: Incoming, context: RayServegRPCContext
    ) -> messages.ClassifyReply:
        """Answer one call; an error is the context's status, and the reply is empty."""
        call = GrpcCall(SERVICE, METHOD, context)
        return await answered(call, lambda: self._classify(incoming, call), messages.ClassifyReply)

    async def _classify(self, incoming: Incoming, call: GrpcCall) -> messages.ClassifyReply:
        observer, service = RequestObserver(), self._service
        call.check(service.keys)
        options = call.options(service.settings.traffic_header)
        with service.admit(options, observer) as admitted:
            async with admitted.arriving():
                body = await self._body(incoming, call, admitted.share)
            answers = await admitted.answer(body)
        start_ms = observer.elapsed_ms()
        reply = reply_of(answers, call.request_id)
        observer.stage_ended("encode", start_ms)
        return reply

    async def _body(self, incoming: Incoming, call: GrpcCall, share: Share) -> RequestBody:
        """Read the message of a call, which may still be to come."""
        settings = self._service.settings
        if isinstance(incoming, messages.ClassifyRequest):
            share.grow(incoming.ByteSize())
            return classify_body(incoming, settings)
        data = await self._receiver.receive_into(share, incoming, call.announced_bytes)
        return await self._receiver.read(
            data, lambda data: classify_body(parsed(data, messages.ClassifyRequest), settings)
        )


def classify_body(request: messages.ClassifyRequest, limits: LimitSettings) -> RequestBody:
    """Return a message's images and options; raises as :func:`app.grpc.call.images_of` does."""
    images = images_of(request, limits.max_files, limits.max_body_bytes)
    names = ("top_k", "threshold", "model_set", "plan", "embedding")
    options = {name: getattr(request, name) for name in names if request.HasField(name)}
    has_set = request.answer_set if request.HasField("answer_set") else None
    sent = [(each.x, each.y, each.width, each.height) for each in request.regions]
    regions = parsed_regions(sent) if sent else None
    return RequestBody(images, has_set=has_set, regions=regions, **options)


def reply_of(results: Iterable[Classified | Fault], request_id: str) -> messages.ClassifyReply:
    """Return the reply with every image's answer or error, in order."""
    rows = []
    for result in results:
        if isinstance(result, Fault):
            code, status = result.code, number_of(result.status)
            error = messages.Error(
                code=code, message=result.message, request_id=request_id, status=status
            )
            rows.append(messages.Result(error=error))
        else:
            rows.append(messages.Result(classified=as_values(result)))
    return messages.ClassifyReply(results=rows, request_id=request_id)


class HealthInterface:
    """Answers SERVING exactly when ``/readyz`` is 200, and needs no key either.

    So its messages have a room of their own: calls without a key take none from calls with one.
    """

    def __init__(self, service: EnsembleService) -> None:
        self._service, self._receiver = service, Receiver(service.settings)

    async def check(
        self, incoming: gRPCInputStream[Message], context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """Answer one call; an error is the context's status, and the reply is empty."""
        call = GrpcCall(HEALTH, CHECK, context)
        return await answered(call, lambda: self._check(incoming, call), HealthCheckResponse)

    async def _check(
        self, incoming: gRPCInputStream[Message], call: GrpcCall
    ) -> HealthCheckResponse:
        data = await self._receiver.receive_short(incoming, call.announced_bytes)
        name = parsed(data, HealthCheckRequest).service
        if name not in NAMES:
            known = ", ".join(NAMES[1:])
            raise UnknownModelError(
                f"no service {name[:MAX_SHOWN]!r} is here; ask for {known}, or for ''"
            )
        try:
            await self._service.check_all_ready()
        except TandemError:
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)


V1ALPHA = reflection.SERVICE_NAME
V1, REFLECTION_METHOD = V1ALPHA.replace("v1alpha", "v1"), "ServerReflectionInfo"


MAX_REFLECTIONS, REFLECTION_LASTS_S = 8, 2.0


class Reflection:
    """Answers reflection about ``services``, for both versions.

    It needs no key, and a client may keep its call open. So a call ends after
    ``REFLECTION_LASTS_S``, and the oldest of ``MAX_REFLECTIONS`` as soon as one more begins.
    """

    def __init__(self, services: set[str]) -> None:
        self._servicer = reflection.aio.ReflectionServicer(services)
        self._limits: list[asyncio.Timeout] = []  # of the open calls, oldest first

    async def answer(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Answer one call."""
        if len(self._limits) >= MAX_REFLECTIONS and not (oldest := self._limits.pop(0)).expired():
            oldest.reschedule(0)
        try:
            async with asyncio.timeout(REFLECTION_LASTS_S) as limit:
                self._limits.append(limit)
                async for reply in self._servicer.ServerReflectionInfo(requests, context):
                    await context.write(reply)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"a call of reflection is open for {REFLECTION_LASTS_S:g} s at most, and less "
                "where others begin; call again",
            )
        finally:
            if limit in self._limits:
                self._limits.remove(limit)


def add_reflection(server: Any, services: Iterable[str]) -> None:
    """Add the service to Serve's gRPC server; it describes ``services`` and both versions."""
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = json_format.MessageToJson(file).replace("v1alpha", "v1")  # v1's own description
    described = json_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(described.SerializeToString())
    handler = grpc.stream_stream_rpc_method_handler(
        Reflection({*services, V1, V1ALPHA}).answer,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for version in (V1, V1ALPHA):
        server.add_passthrough_service(version)  # answered in the server, without a deployment
        handlers = grpc.method_handlers_generic_handler(version, {REFLECTION_METHOD: handler})
        server.add_generic_rpc_handlers((handlers,))


def max_message_bytes(max_body_bytes: int) -> int:
    """Return the limit of a message: its images, and some bytes for headers."""
    return min(max_body_bytes + MARGIN_BYTES, GRPC_MOST_BYTES)


class Receiver:
    """Receives one message of each call.

    All messages being received have at most ``max_bytes_in_flight``. Half of that is for small
    messages, divided equally among all requests that may be under way, so small messages never
    wait. Large ones share the other half (:class:`ReceiveRoom`).
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._max_body_bytes = limits.max_body_bytes
        self._max_bytes = max_message_bytes(limits.max_body_bytes)
        half = limits.max_bytes_in_flight // 2
        self._small_bytes = half // limits.max_concurrent_requests
        self._room = ReceiveRoom(half)
        self._short = Uploads(slow_after_s=SHORT_IS_SLOW_AFTER_S)
        self._parsing = asyncio.Lock()

    async def receive(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Return the call's message; until there is memory for it the client keeps it.

        A call that announces no length reserves memory for the longest message.

        Raises:
            BodyTooLargeError: the message is over the limit; nothing was received.
            OverloadedError: there is no memory for it.
            SlowBodyError: it arrived slowly while others waited for its memory.
            BadParameterError: the call has no message.
            ClientGoneError: the client hung up before.
        """
        num_bytes = self._max_bytes if announced is None else announced
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"the message has {num_bytes} bytes, the limit is {self._max_body_bytes}; "
                "send smaller ones (1,000 pixels a side are plenty) or fewer images per request"
            )
        if num_bytes <= self._small_bytes:
            return await _first(stream)
        async with self._room.taken(num_bytes):
            return await _first(stream)

    async def receive_into(
        self, share: Share, stream: gRPCInputStream[Message], announced: int | None
    ) -> bytes:
        """Return the call's message as :meth:`receive` does, and count it in ``share``."""
        share.expect(announced or 0)
        message = await self.receive(stream, announced)
        share.grow(len(message))
        return message

    async def read(self, message: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Return ``parse(message)``; long messages are parsed in turn, on a thread.

        Protobuf lets no other thread run while it copies, for some 10 ms of 20 MB.
        """
        if len(message) <= LONG_BYTES:
            return parse(message)
        async with self._parsing:
            return await asyncio.to_thread(parse, message)

    async def receive_short(self, stream: gRPCInputStream[Message], announced: int | None) -> bytes:
        """Read a metadata request, whose places are limited apart from admission.

        Otherwise a client that never sends the rest of its message would hold one of Serve's places
        for all requests, for any time.

        Raises:
            BodyTooLargeError: the message is longer than any metadata request.
            OverloadedError: too many of them are being received, all just begun.
            SlowBodyError: the message did not arrive in time.
            BadParameterError, ClientGoneError: the call has no message.
        """
        _check_short(announced or 0)
        if self._short.num >= SHORT_PLACES and not self._short.cut_slowest():
            raise OverloadedError(f"{SHORT_PLACES} messages are awaited, the limit; {IN_A_SECOND}")
        try:
            async with self._short.arriving(SHORT_WITHIN_S):
                message = await self.receive(stream, announced)
        except SlowBodyError as error:
            raise SlowBodyError(
                f"the message was not there in time ({SHORT_WITHIN_S:g} s, and less where others "
                "wait); send it in one piece"
            ) from error
        _check_short(len(message))
        return message


class ReceiveRoom:
    """Memory for messages while they arrive, in bytes; first come, first served.

    It counts the length that a message may reach, unlike
    :class:`~app.queueing.admission.ByteBudget`, since grpcio does not show how much has arrived.
    So slow messages must be cut off.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.num_taken = limit, 0
        self._turn, self._someone_left = asyncio.Lock(), asyncio.Event()
        self._uploads = Uploads()

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve ``num_bytes`` during the block; a single call may exceed the limit.

        Raises:
            OverloadedError: other calls held the bytes for too long.
            SlowBodyError: the block took long while others waited.
        """
        await self._take(num_bytes)
        try:
            async with self._uploads.arriving(num_bytes=num_bytes):
                yield
        finally:
            self.num_taken -= num_bytes
            self._someone_left.set()

    async def _take(self, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(WAIT_AT_MOST_S), self._turn:
                while self.num_taken and self.num_taken + num_bytes > self._limit:
                    await self._wait_or_cut(num_bytes)
                self.num_taken += num_bytes
        except TimeoutError as error:
            raise OverloadedError(
                f"the messages that are being received may have {self.num_taken} bytes, of "
                f"{self._limit} for all together, and this one {num_bytes} more; try again in 1 s"
            ) from error

    async def _wait_or_cut(self, num_bytes: int) -> None:
        """Return when a message has left, or the slowest one was cut off."""
        slowest = self._uploads.slowest
        if self._uploads.num_bytes + num_bytes <= self._limit:
            slowest = None  # one was cut off already, which frees enough
        self._someone_left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(slowest.slow_from if slowest else None):
                await self._someone_left.wait()
            return
        self._uploads.cut_slowest()


def _check_short(num_bytes: int) -> None:
    if num_bytes > SHORT_BYTES:
        raise BodyTooLargeError(
            f"the message has {num_bytes} bytes, the limit of this method is {SHORT_BYTES}; send "
            "images to ModelInfer"
        )


async def _first(stream: gRPCInputStream[Message]) -> bytes:
    async for message in stream:
        return message.take()
    if stream.is_cancelled():
        raise ClientGoneError("the client hung up before its message was there")
    raise BadParameterError("the call has no message; send one")
