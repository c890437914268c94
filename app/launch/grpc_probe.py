"""Asks at the gRPC port whether calls reach the application yet."""

# What does not get there: HAProxy knows no replica yet (NOT_FOUND), or none that listens.
ON_THE_WAY = ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN")
ANSWERS_WITHIN_S = 5.0
# Beside tandem.proto's: a replica's server answers UNIMPLEMENTED before the application hears of
# it, so nothing is counted. HAProxy itself answers Healthz while it knows of no replica.
METHOD = "/tandem.v1.Ensemble/Ready"


class GrpcProbe:
    """A call of a method that does not exist, to ``target`` as grpcio names addresses."""

    def __init__(self, target: str, application: str) -> None:
        self._target, self._metadata = target, (("application", application),)

    def reaches_application(self) -> bool:
        """Ask once, on a connection of its own, since HAProxy is reloaded meanwhile."""
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self._target, options) as channel:
            call = channel.unary_unary(METHOD)
            try:
                call(b"", timeout=ANSWERS_WITHIN_S, metadata=self._metadata)
            except grpc.RpcError as error:
                return error.code().name not in ON_THE_WAY
        return True
