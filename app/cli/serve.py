"""``tandem serve``: serves the ensemble on this machine, or puts it on a running cluster."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    model_set: Annotated[str | None, typer.Option(help="name of a set, or its folder")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve configuration  (default: serve_config.yaml)")
    ] = None,
    host: Annotated[str | None, typer.Option(help="0.0.0.0 serves other machines")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster to join: auto, or HOST:PORT")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option(help="serve a set even if INT8 lost more than its max_drop")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="for Prometheus  (default: 9464, or else a free one)"),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="0.0.0.0: a Prometheus elsewhere may scrape  (default: loopback)"),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="let in only callers with a key of this file, one a line")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="serve gRPC too, there  (default: not)")
    ] = None,
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
            metrics_host=metrics_host,
            api_keys_file=api_keys_file,
            grpc_port=grpc_port,
        )
    )
