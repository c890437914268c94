"""``tandem doctor``: what a start finds on this machine, and what to mend before it."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from platform import python_version
from typing import Annotated, Literal

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.launch.config import ServeConfig
from app.launch.log import logger
from app.launch.serve_options import ServeOptions
from models.errors import TandemError
from models.machine import DISTRIBUTION, available_cpus, cpu_model, instructions_of, usable_cpus

State = Literal["good", "warning", "error"]
STYLES = {"good": "green", "warning": "yellow", "error": "red"}
SERVED = ("ray", "openvino", "numpy")
# CPU-ms of the bundled set's networks for a photo: docs/performance.md.
NO_INT8 = (
    "INT8 has no instructions of its own here, and a photo costs about three times as much as with "
    "avx512_vnni, avx_vnni or amx_int8; plan: fast asks fewer networks"
)


@dataclass(frozen=True)
class Finding:
    """A subject, its state here, and what to do unless it is good."""

    about: str
    text: str
    state: State = "good"


def doctor(
    context: typer.Context,
    options: ServeOptions,
    as_json: Annotated[
        bool, typer.Option("--json", allow_from_autoenv=False, help="the findings as JSON")
    ] = False,
) -> None:
    """Show what serve finds on this machine, and what to mend; exit code 1 if it would fail.

    It takes the options and variables of tandem serve, and makes the checks of its start:
    configuration, ports, memory, sets and their files. Nothing is started.
    """
    names = context.params.items()
    flags = {n for n, _ in names if (s := context.get_parameter_source(n)) and s.name != "DEFAULT"}
    findings = [*_of_machine(), *_of_start(options, flags)]
    has_error = any(finding.state == "error" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"would_start": not has_error, "findings": rows}, indent=2))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            style = STYLES[finding.state]
            table.add_row(finding.about, f"[{style}]{finding.state}[/]", escape(finding.text))
        table.columns[2].overflow = "fold"
        console = Console(highlight=False, emoji=False)
        console.print(table)
        console.print("tandem serve would not start" if has_error else "tandem serve would start")
    if has_error:
        raise typer.Exit(1)


def _of_machine() -> Iterator[Finding]:
    cpu = cpu_model()
    has_int8 = {"avx512_vnni", "avx_vnni", "amx_int8"} & set(instructions_of(cpu).split())
    if has_int8:
        yield Finding("CPU", f"{cpu}; INT8 has instructions of its own")
    else:
        yield Finding("CPU", f"{cpu}; {NO_INT8}", "warning")
    used, there = available_cpus(), len(usable_cpus())
    quota = f" of {there}, by the group's quota" if used < there else ""
    yield Finding("cores", f"{used}{quota}")
    from app.stages.threads import memory_left

    total, left = psutil.virtual_memory(), memory_left(at_most=True)
    group = f"; the group leaves {left / 1e6:.0f} MB" if left < total.available else ""
    text = f"{total.available / 1e6:.0f} MB free of {total.total / 1e6:.0f} MB{group}"
    yield Finding("memory", text)
    versions = ", ".join(f"{name} {version(name)}" for name in (DISTRIBUTION, *SERVED))
    yield Finding("software", f"Python {python_version()}, {versions}")


def _of_start(options: ServeOptions, flags: set[str]) -> Iterator[Finding]:
    """Make the checks of a start; each of its warnings is a finding, and so is its error."""
    from app.launch.serve import checked_start

    with _said() as lines:
        try:
            with checked_start(options, flags) as config:
                yield from _of_config(config)
        except TandemError as error:
            yield Finding("start", error.message, "error")
    for line in lines:
        yield Finding("start", line, "warning")


def _of_config(config: ServeConfig) -> Iterator[Finding]:
    from app.traffic.control import loaded_sets
    from models.ledger import judge

    settings = config.settings
    ports = {"HTTP": config.http.port, "gRPC": config.grpc_port}
    free = ", ".join(f"{name} {port}" for name, port in ports.items() if port is not None)
    yield Finding("ports", f"{config.http.host}: {free}")
    for model_set in loaded_sets(settings):
        served = settings.served_precision
        members = ", ".join(member.name for member in model_set.manifest.members)
        verdict = judge(model_set.manifest, served, model_set.argument)
        # Another verdict is a warning of the start, which is a finding of its own.
        record = verdict.message if verdict.status == "verified" else model_set.name
        yield Finding("set", f"{record}; {served} of {members}")


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect the warnings that a start logs."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler, propagate = Collecting(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
