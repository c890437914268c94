"""What tracing costs: ``python tests/load/tracing.py PHOTOS``.

Services without tracing, with every hundredth request traced and with all of them run side by side
and are loaded in many short turns with 16 clients; what counts is the median of each round's ratio
to the one without, with its bootstrap interval of 90 %: a noisy machine shows there. Spans go to a
gRPC receiver in another process, which reads none of them. Prints JSON.
"""

import json
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import grpc
import numpy as np
import psutil
import typer
import yaml
from machine import ROOT, describe
from running import Running, running_service

from app.bench.client import Target
from app.bench.generator import run_load
from app.bench.load import Load, photos_in
from app.bench.samples import summarise

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
RATIOS = {"off": None, "0.01": 0.01, "1.0": 1.0}
CLIENTS = 16


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 3.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure all in turns."""
    bodies = photos_in(photos)
    rows: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        endpoint = stack.enter_context(receiver())
        folder = Path(stack.enter_context(TemporaryDirectory()))
        services = {
            name: stack.enter_context(running_service("--config", str(config)))
            for name, config in configs(folder, endpoint).items()
        }
        for service in services.values():
            load(service, bodies, 5.0)
        for number in range(rounds):
            order = random.Random(number).sample(list(services), len(services))
            rows.append({name: load(services[name], bodies, seconds) for name in order})
            typer.echo(f"round {number + 1} of {rounds}: {rows[-1]}", err=True)
    result = {"machine": describe(), "clients": CLIENTS, **ratios(rows), "rounds": rows}
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def load(service: Running, bodies: list[bytes], seconds: float) -> dict[str, float]:
    """Return throughput and CPU time of one turn."""
    run = run_load(
        Load(Target(service.url, bodies), seconds, clients=CLIENTS),
        psutil.Process(service.process.pid),
    )
    summary = summarise(run, 100)
    if summary.errors or summary.service_cpu_ms is None:
        raise SystemExit(f"requests failed: {summary.errors}")
    return {"images_per_s": summary.images_per_s, "cpu_ms_per_image": summary.service_cpu_ms}


def ratios(rows: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the cost of each sampling ratio, in percent of the service without tracing."""
    found = {}
    for name in list(RATIOS)[1:]:
        rate = [row[name]["images_per_s"] / row["off"]["images_per_s"] for row in rows]
        cpu = [row[name]["cpu_ms_per_image"] / row["off"]["cpu_ms_per_image"] for row in rows]
        found[f"sampling_{name}"] = {
            "throughput_lost_percent": median_percent([1 - ratio for ratio in rate]),
            "more_cpu_percent": median_percent([ratio - 1 for ratio in cpu]),
        }
    return found


def median_percent(values: list[float]) -> dict[str, float]:
    """Return the median and its interval of 90 %, by resampling, in percent."""
    rng = np.random.default_rng(1)
    medians = np.median(rng.choice(values, (10_000, len(values))), axis=1)
    low, high = np.percentile(medians, (5, 95))
    named = {"median": np.median(values), "low": low, "high": high}
    return {name: round(float(value) * 100, 2) for name, value in named.items()}


def configs(folder: Path, endpoint: str) -> dict[str, Path]:
    """Write a configuration for each ratio."""
    paths = {}
    for name, ratio in RATIOS.items():
        content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
        content["tracing_config"] |= {"enabled": ratio is not None, "sampling_ratio": ratio or 0.0}
        arguments = {"trace_endpoint": endpoint, "trace_dir": str(folder / name)}
        content["applications"][0]["args"] |= arguments
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(content), "utf-8")
    return paths


@contextmanager
def receiver() -> Iterator[str]:
    """Run a receiver in a process of its own; yield its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _receive(pipe: Connection) -> None:
    """Take everything, in the child; a collector would read it, on a machine of its own."""
    export = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),)
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    typer.run(main)
