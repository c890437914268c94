"""Memory over many requests: ``python tests/load/growth.py --requests 100000``.

Serves a tiny network, so that the requests take minutes and not an hour: HTTP, decoding, queues and
answers are what the real networks have too. Prints JSON: memory by process after each part.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, process_tree, pss_mb
from running import running_service

from app.bench.client import Target
from app.bench.generator import run_load
from app.bench.load import Load, drawn_photos
from app.bench.samples import summarise
from tests.support.tiny_networks import write_tiny_set

PART_S = 15.0
REPLICA = "ray::ServeReplica:tandem:Gateway"


def main(
    requests: Annotated[int, typer.Option(min=1000)] = 100_000,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Send that many requests in parts and look at the memory after each."""
    with tempfile.TemporaryDirectory() as folder:
        model_set = write_tiny_set(Path(folder) / "tiny", size=64)
        with running_service("--model-set", str(model_set), "--allow-unverified") as service:
            parts, errors = _parts(service.url, service.process.pid, requests)
    warm, last = _after(parts, requests // 5), parts[-1]
    result = {
        "machine": describe(),
        "requests": last["requests"],
        "errors": errors,
        "gateway_mb": {"after_a_fifth": warm["mb"][REPLICA], "at_the_end": last["mb"][REPLICA]},
        "all_mb": {
            "after_a_fifth": round(sum(warm["mb"].values()), 1),
            "at_the_end": round(sum(last["mb"].values()), 1),
        },
        "parts": parts,
    }
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def _parts(url: str, pid: int, requests: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    target, done, parts = Target(url, drawn_photos()), 0, []
    errors: dict[str, int] = {}
    while done < requests:
        summary = summarise(run_load(Load(target, PART_S, clients=16), None), 100)
        done += summary.num_ok
        for kind, number in summary.errors.items():
            errors[kind] = errors.get(kind, 0) + number
        sizes = {name: mb for name, mb in pss_mb(process_tree(pid)).items() if name}
        parts.append({"requests": done, "per_s": summary.throughput, "mb": sizes})
        typer.echo(f"{done}: {sizes.get(REPLICA)} MB, {summary.throughput}/s", err=True)
    return parts, errors


def _after(parts: list[dict[str, Any]], requests: int) -> dict[str, Any]:
    return next(part for part in parts if part["requests"] >= requests)


if __name__ == "__main__":
    typer.run(main)
