"""``tandem serve``: serves the ensemble on this machine, or deploys it to a running cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from app.launch.resolved_config import ServeOptions


def serve(
    context: typer.Context,
    model_set: Annotated[str | None, typer.Option(help="name of a set, or its folder")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve configuration  (default: serve_config.yaml)")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="address to listen on; 0.0.0.0 serves other machines")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port  (default: 8000)")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="running Ray cluster to deploy to: auto, or HOST:PORT")
    ] = None,
    allow_unverified: Annotated[
        bool | None,
        typer.Option(
            help="serve a set even if INT8 lost more than its max_drop  (default: refuse it)"
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port for Prometheus  (default: 9464, or a free one)"),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="0.0.0.0 admits a Prometheus elsewhere  (default: loopback)"),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="answer only requests with a key of this file, one a line")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="gRPC port  (default: no gRPC)")
    ] = None,
    portable: Annotated[
        bool | None,
        typer.Option(help="serve without HAProxy, on loopback only  (default: except on Linux)"),
    ] = None,
    log_format: Annotated[
        Literal["json", "text"] | None,
        typer.Option(help="format on stderr  (default: text in a terminal, otherwise json)"),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            allow_from_autoenv=False,
            help="print every setting and its source, and end",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", allow_from_autoenv=False, help="with --print-config: as JSON")
    ] = False,
) -> None:
    """Serve the ensemble over HTTP until Ctrl-C; starts Ray, and stops it at the end.

    With --address it is deployed to a running cluster instead, and removed at the end. The
    cluster's nodes need the environment of docs/how-to/cluster.md to be fast. Every setting may
    also be a variable, TANDEM_<SETTING>. A flag precedes a variable, and a variable the file.
    """
    from app.launch.resolved_config import ServeOptions

    options = ServeOptions(
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
        portable=portable,
        log_format=log_format,
    )
    if print_config:
        _print_config(context, options, as_json=as_json)
        return
    if as_json:
        raise typer.BadParameter("--json goes with --print-config")
    from app.launch.serve import run_service

    run_service(options)


def _print_config(context: typer.Context, options: "ServeOptions", *, as_json: bool) -> None:
    """Print the settings with the source of each (flag, variable, file), as YAML or as JSON."""
    from app.launch.resolved_config import resolved, unknown_variables

    sources = {name: context.get_parameter_source(name) for name in context.params}
    flags = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    for line in unknown_variables():
        typer.echo(line, err=True)
    rows = resolved(options, flags)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    lines = {f"{name}: {json.dumps(row['value'])}": row["source"] for name, row in rows.items()}
    width = min(max(map(len, lines)), 48)
    for line, source in lines.items():
        typer.echo(f"{line:{width}}  # {source}")
