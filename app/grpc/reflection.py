"""gRPC's reflection as ``grpc.reflection.v1``, which clients try first; grpcio has only v1alpha.

The messages of both versions are equal on the wire, so v1alpha's servicer answers both.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1, METHOD = V1ALPHA.replace("v1alpha", "v1"), "ServerReflectionInfo"


def add_reflection_v1(server: Any, services: Iterable[str]) -> None:
    """Add the service to Serve's gRPC server; it describes ``services`` and both versions."""
    descriptor_pool.Default().AddSerializedFile(_described())
    servicer = reflection.aio.ReflectionServicer({*services, V1, V1ALPHA})
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_passthrough_service(V1)  # answered in the server, without a deployment
    handlers = grpc.method_handlers_generic_handler(V1, {METHOD: handler})
    server.add_generic_rpc_handlers((handlers,))


def _described() -> bytes:
    """Return v1's own description: v1alpha's under the new name."""
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = json_format.MessageToJson(file).replace("v1alpha", "v1")
    described: bytes = json_format.Parse(text, FileDescriptorProto()).SerializeToString()
    return described
