"""A client of the Open Inference Protocol's gRPC service, made from its definition."""

from types import SimpleNamespace
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from app.grpc import open_inference_pb2

SERVICE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def inference_stub(channel: Any) -> Any:
    """Return an object with a callable for each method; the channel is of grpc or grpc.aio."""
    calls = SimpleNamespace()
    for method in SERVICE.methods:
        call = channel.unary_unary(
            f"/{SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(calls, method.name, call)
    return calls
