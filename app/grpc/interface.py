"""The gRPC services that are not the Open Inference Protocol's.

``Ensemble.Classify`` answers images. ``grpc.health.v1`` is for Kubernetes and load balancers. It
has only ``Check``: clients take a server without ``Watch`` for a serving one, by the protocol, and
a ``Watch`` call never ends, so it would delay a replica that stops. Reflection is there as
``grpc.reflection.v1``, which clients try first; grpcio has only v1alpha. The messages of both are
equal on the wire, so v1alpha's servicer answers both.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.answers import Classified, Fault, as_values
from app.errors import MAX_SHOWN, UnknownModelError
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
from app.grpc.receiver import Receiver
from app.queueing.admission import Share
from app.setting_groups import LimitSettings
from app.telemetry.metrics import RequestObserver
from models.errors import TandemError

# A message that is still to come (:func:`app.grpc.call.add_servicer`), or with the generated
# function one that was received before the call.
Incoming = gRPCInputStream[Message] | messages.ClassifyRequest


class GrpcInterface:
    """Answers ``Classify`` calls with ``service``; other interfaces may share ``receiver``."""

    def __init__(self, service: EnsembleService, receiver: Receiver | None = None) -> None:
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


# "" is the server as a whole.
NAMES = ("", SERVICE, OPEN_INFERENCE, *dict.fromkeys(TENSORFLOW_METHODS.values()))


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
