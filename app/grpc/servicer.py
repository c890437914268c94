"""Registers the interface with Serve's gRPC server, so that a call begins before its message.

On the wire a call with one request message and one with a stream of them are the same. Registered
as the second kind, a method is called when the headers are there and receives the message itself:
key, admission and byte budget come before it. What nobody receives stays with the client, but for
one flow control window (HTTP/2).
"""

from typing import Any

import grpc

from app.grpc import tandem_pb2 as messages

SERVICE = messages.DESCRIPTOR.services_by_name["Ensemble"].full_name
METHOD = "Classify"


def add_servicer(servicer: Any, server: Any) -> None:
    """Do what the generated ``add_EnsembleServicer_to_server`` does, with messages still to come.

    Messages are handed over as bytes: one that is no ``ClassifyRequest`` then has an answer too.
    Serve calls this (``grpc_servicer_functions``) with a servicer of its own, and with servers that
    put its own handlers in place of the servicer's methods.
    """
    handlers = {METHOD: grpc.stream_unary_rpc_method_handler(getattr(servicer, METHOD))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
