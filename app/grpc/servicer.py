"""Registers the interfaces with Serve's gRPC server, so that a call begins before its message.

On the wire, a call with one request message equals a call with a stream of them. A method
registered for streams is called when the headers are there, and receives the message itself. So the
key, admission and the byte budget are checked first. Until a message is received it stays with the
client, except for one flow control window (HTTP/2).
"""

from collections.abc import Callable
from typing import Any

import grpc

from app.grpc import open_inference_pb2, tandem_pb2

SERVICE = tandem_pb2.DESCRIPTOR.services_by_name["Ensemble"].full_name
METHOD = "Classify"
_OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
OPEN_INFERENCE, OPEN_INFERENCE_METHODS = (
    _OPEN_INFERENCE.full_name,
    [*_OPEN_INFERENCE.methods_by_name],
)

HEALTH, CHECK = "grpc.health.v1.Health", "Check"


class Message:
    """A message's bytes, which :meth:`take` hands over once.

    grpcio keeps a stream's last message in a reference cycle until the garbage collector runs. That
    could be dozens of messages of many MB. So grpcio keeps only this object.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], "Message"], tuple[bytes]]:
        return Message, (self._data,)  # Serve's own proxy sends it to the replica

    def take(self) -> bytes:
        """Return the bytes and drop the reference to them."""
        data, self._data = self._data, b""
        return data


def add_servicer(servicer: Any, server: Any) -> None:
    """Add all services as the generated functions do, but without receiving the messages.

    Messages are passed on unparsed, so that an invalid one gets an answer too. Serve calls this
    (``grpc_servicer_functions``) with its own servicer, and with servers that replace the
    servicer's methods by Serve's handlers.
    """
    services = {
        SERVICE: [METHOD],
        OPEN_INFERENCE: OPEN_INFERENCE_METHODS,
        HEALTH: [CHECK],
    }
    for service, methods in services.items():
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(getattr(servicer, name), Message)
            for name in methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
