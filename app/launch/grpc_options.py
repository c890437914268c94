"""The ``grpc_options`` of serve_config.yaml, off unless a port is asked for."""

from typing import Any

ADD_SERVICER = "app.grpc.servicer.add_servicer"
# What a file may name instead: with it a message is received before anybody is asked.
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"


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
