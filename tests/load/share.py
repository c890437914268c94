"""The share of the bound that arrives at the HTTP client: ``python tests/load/share.py PHOTOS``.

One service and the same networks in this process take turns, round by round, on the same photos: 16
clients against the best in-process setup, and one client against one image alone. Prints JSON.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from machine import describe
from running import running_service

from app.bench.client import Target
from app.bench.generator import Load, run_load
from app.bench.limit import Pipeline, measure_limit, single_image_ms
from app.bench.photos import photos_in
from app.bench.samples import summarise
from app.bench.tree import service_root
from models.model_set import load_model_set


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 10.0,
    config: Annotated[Path | None, typer.Option(help="of the service")] = None,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure both in turns."""
    model_set, bodies = load_model_set("imagenette"), photos_in(photos)
    limit = measure_limit(model_set, bodies, rounds=2, seconds=2.0)
    pipeline = Pipeline(model_set, "INT8", limit.best)
    num_batches = max(1, round(limit.images_per_s * seconds / limit.best.batch_size))
    arguments = ("--config", str(config)) if config else ()
    with running_service(*arguments) as service:
        root = service_root(service.url)
        target = Target(service.url, bodies)
        run_load(Load(target, 5.0, clients=16), None)
        rows: list[dict[str, Any]] = []
        for _ in range(rounds):
            bound = pipeline.run(bodies, num_batches)
            many = summarise(run_load(Load(target, seconds, clients=16), root), 100)
            alone_ms = single_image_ms(model_set, bodies, "INT8")
            one = summarise(run_load(Load(target, seconds / 2, clients=1), root), 100)
            rows.append(
                {
                    "bound_images_per_s": round(bound, 2),
                    "http_images_per_s": many.throughput,
                    "share": round(many.throughput / bound, 4),
                    "cpu_ms_per_image": many.service_cpu_ms,
                    "client_cpu_ms": many.client_cpu_ms,
                    "in_process_ms": round(alone_ms, 2),
                    "http_ms": one.p50_ms,
                    "overhead_ms": round((one.p50_ms or 0) - alone_ms, 2),
                    "errors": many.errors | one.errors,
                }
            )
    result = {
        "machine": describe(),
        "best_setup": limit.as_json(),
        "rounds": rows,
        "median_share": median(row["share"] for row in rows),
        "median_overhead_ms": median(row["overhead_ms"] for row in rows),
    }
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
