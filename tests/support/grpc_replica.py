"""The gRPC server of a replica as Serve makes it, with the interface in the replica's place."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from ray.serve._private.grpc_util import start_grpc_server
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.config import gRPCOptions
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.launch.checks import free_port
from app.launch.config import ADD_SERVICER


@asynccontextmanager
async def grpc_replica(interface, add_servicer=ADD_SERVICER, grace_s=None):
    """Serve ``interface`` on a port of this machine, in this process; yield the port.

    When it stops, calls have ``grace_s`` to end.
    """

    def handler_of(service_method: str, streaming_type: gRPCStreamingType) -> Callable[..., Any]:
        # replica.py: _direct_ingress_stream_unary and _direct_ingress_unary_unary
        is_stream = streaming_type is gRPCStreamingType.STREAM_UNARY

        async def handle(incoming: Any, context: Any) -> bytes:
            own = RayServegRPCContext(context)
            own.set_trailing_metadata([("request_id", "r1")])
            reply = await interface.classify(
                gRPCInputStream(incoming) if is_stream else incoming, own
            )
            own._set_on_grpc_context(context)
            return reply.SerializeToString()

        return handle

    port = free_port()
    options = gRPCOptions(port=port, grpc_servicer_functions=[add_servicer])
    loop = asyncio.get_running_loop()
    ended, server = await start_grpc_server(handler_of, options, event_loop=loop)
    try:
        yield port
    finally:
        await server.stop(grace_s)
        await ended
