"""``tandem serve``: serves the ensemble on this machine, or puts it on a running cluster."""

from pathlib import Path
from typing import Annotated

import typer

Port = Annotated[int | None, typer.Option(min=1, max=65535)]
ModelSet = Annotated[str | None, typer.Option(help="name of a set, or its folder")]
ConfigFile = Annotated[
    Path | None, typer.Option(help="Ray Serve configuration  (default: serve_config.yaml)")
]
Host = Annotated[str | None, typer.Option(help="0.0.0.0 serves other machines")]
Address = Annotated[
    str | None, typer.Option(help="a running Ray cluster to join: auto, or HOST:PORT")
]
AllowUnverified = Annotated[
    bool, typer.Option(help="serve a set even if INT8 lost more than its max_drop")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="for Prometheus  (default: 9464, or else a free one)"),
]
ApiKeysFile = Annotated[
    Path | None, typer.Option(help="let in only callers with a key of this file, one a line")
]
GrpcPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="serve gRPC too, there  (default: not)")
]


def serve(
    model_set: ModelSet = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    address: Address = None,
    allow_unverified: AllowUnverified = False,
    metrics_port: MetricsPort = None,
    api_keys_file: ApiKeysFile = None,
    grpc_port: GrpcPort = None,
) -> None:
    """Serve the ensemble over HTTP until Ctrl-C; Ray is started for it and stopped with it.

    With --address the graph is put on a running cluster instead, and taken off it at the end. The
    cluster's nodes need the environment of configs/README.md to be fast.
    """
    from app.launch.serve import ServeOptions, run_service

    run_service(
        ServeOptions(
            model_set=model_set,
            config=config,
            host=host,
            port=port,
            address=address,
            allow_unverified=allow_unverified,
            metrics_port=metrics_port,
            api_keys_file=api_keys_file,
            grpc_port=grpc_port,
        )
    )
