"""The gRPC port: off unless it is asked for, and whether calls reach the application there yet."""

from typing import Any

ADD_SERVICER = "app.grpc.servicer.add_servicer"
# What a file may name instead: with it a message is received before anybody is asked.
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
# What does not get there: HAProxy knows no replica yet (NOT_FOUND), or none that listens.
ON_THE_WAY = ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN")
ANSWERS_WITHIN_S = 5.0
# Beside tandem.proto's: a replica's server answers UNIMPLEMENTED before the application hears of
# it, so nothing is counted. HAProxy itself answers Healthz while it knows of no replica.
METHOD = "/tandem.v1.Ensemble/Ready"


def with_grpc(content: dict[str, Any], port: int | None) -> dict[str, Any]:
    """Return the configuration with the interface on ``port``; None leaves the file's own."""
    options = dict(content.get("grpc_options", {}))
    functions = options.get("grpc_servicer_functions", [])
    if port is not None:
        options |= {"port": port, "grpc_servicer_functions": [ADD_SERVICER]}
    elif GENERATED in functions:
        own = [ADD_SERVICER if name == GENERATED else name for name in functions]
        options["grpc_servicer_functions"] = own
    else:
        return content
    return {**content, "grpc_options": options}


def grpc_port(content: dict[str, Any]) -> int | None:
    """Return the port that gRPC will have; None if it is off."""
    from ray.serve.schema import gRPCOptionsSchema

    options = gRPCOptionsSchema.model_validate(content.get("grpc_options", {}))
    return options.port if options.grpc_servicer_functions else None


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
