"""The gRPC interface: parses ``Ensemble.Classify`` messages and renders the reply."""

from collections.abc import Iterable
from dataclasses import dataclass

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
from app.settings import Settings

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
        body = GrpcBody(incoming, call.announced_bytes, self._receiver, service.settings)
        options = call.options(service.settings.traffic_header)
        answers = await service.answer(body, options, observer)
        with observer.stage("encode"):
            return reply_of(answers, call.request_id)


@dataclass(slots=True)
class GrpcBody:
    """The message of a call, which may still be to come."""

    incoming: Incoming
    announced: int | None
    receiver: Receiver
    settings: Settings

    async def read(self, share: Share) -> RequestBody:
        request = self.incoming
        if isinstance(request, messages.ClassifyRequest):
            share.grow(request.ByteSize())
        else:
            data = await self.receiver.receive_into(share, request, self.announced)
            request = parsed(data, messages.ClassifyRequest)
        images = images_of(request, self.settings.max_files, self.settings.max_body_bytes)
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
