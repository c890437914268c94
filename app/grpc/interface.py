"""The gRPC interface: parses ``Ensemble.Classify`` messages and renders the reply."""

from collections.abc import Iterable

from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.graph.observer import RequestObserver
from app.graph.request import RequestBody
from app.graph.service import EnsembleService
from app.grpc import tandem_pb2 as messages
from app.grpc.call import GrpcCall, answered, number_of
from app.grpc.receiver import Receiver
from app.grpc.request import images_of, parsed
from app.grpc.servicer import METHOD, SERVICE, Message
from app.messages import Fault
from app.queueing.byte_budget import Share
from app.responses import Classified, as_values

# A message that is still to come (:func:`app.grpc.servicer.add_servicer`), or with the generated
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
        service.keys.check(call.authorization)
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
            request = incoming
            share.grow(request.ByteSize())
        else:
            data = await self._receiver.receive_into(share, incoming, call.announced_bytes)
            request = parsed(data, messages.ClassifyRequest)
        images = images_of(request, settings.max_files, settings.max_body_bytes)
        return RequestBody(
            images,
            request.top_k if request.HasField("top_k") else None,
            threshold=request.threshold if request.HasField("threshold") else None,
            model_set=request.model_set if request.HasField("model_set") else None,
        )


def reply_of(results: Iterable[Classified | Fault], request_id: str) -> messages.ClassifyReply:
    """Return the reply with every image's answer or error, in order."""
    rows = [
        messages.Result(error=_error(result, request_id))
        if isinstance(result, Fault)
        else messages.Result(classified=as_values(result))
        for result in results
    ]
    return messages.ClassifyReply(results=rows, request_id=request_id)


def _error(fault: Fault, request_id: str) -> messages.Error:
    return messages.Error(
        code=fault.code,
        message=fault.message,
        request_id=request_id,
        status=number_of(fault.status),
    )
