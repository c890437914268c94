"""gRPC's health protocol, ``grpc.health.v1``, which Kubernetes and load balancers use.

Only ``Check``: clients take a server without ``Watch`` for a serving one, by the protocol. A
``Watch`` call never ends, and would delay a replica that stops.
"""

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.errors import MAX_SHOWN, UnknownModelError
from app.graph.service import EnsembleService
from app.grpc.call import GrpcCall, answered
from app.grpc.receiver import Receiver
from app.grpc.request import parsed
from app.grpc.servicer import CHECK, HEALTH, OPEN_INFERENCE, SERVICE, Message
from models.errors import TandemError

NAMES = ("", SERVICE, OPEN_INFERENCE)  # "" is the server as a whole


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
