"""Renders the response models of :mod:`app.responses` as protobuf messages."""

from collections.abc import Iterable

from app.grpc import tandem_pb2 as messages
from app.grpc.status import number_of
from app.messages import Fault
from app.responses import Classified, as_values


def reply_of(results: Iterable[Classified | Fault], request_id: str) -> messages.ClassifyReply:
    """Dress every image's answer, or its own error, in order."""
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
