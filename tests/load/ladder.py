"""From the obvious graph to ours, a row for each change: ``python tests/load/ladder.py PHOTOS``.

Every round starts each variant in turn, warms it up, loads it with 16 clients and with one, and
measures the bound of the machine before and after; what counts is the median of the rounds' shares.
Prints JSON.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
import yaml
from bound import Bound
from machine import ROOT, describe, write_result
from running import TANDEM, running

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import summarise

# Serve's own defaults, which tandem serve would set otherwise.
PLAIN = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
TOLD = {"RAY_SERVE_HAPROXY_METRICS_ENABLED": "1"}  # of each request, by HAProxy
BUSY = TOLD | {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "100",
}
WARM_UP_S = 8.0
SEPARATE = {"decoder": "deployment", "members": "deployment"}
THROUGH_RAY = SEPARATE | {"local_channels": False}


@dataclass(frozen=True)
class Rung:
    """A variant: what changed, and the arguments and environment that make it."""

    change: str
    args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_obvious: bool = False


RUNGS = {
    "obvious": Rung("the obvious graph (tests/load/obvious.py)", is_obvious=True),
    "queue": Rung("batch queue, fixed batch sizes, no pinning", THROUGH_RAY, PLAIN | BUSY),
    "haproxy": Rung("HAProxy and Serve's throughput mode", THROUGH_RAY, BUSY),
    "sockets": Rung("calls over Unix-domain sockets instead of through Ray", SEPARATE, BUSY),
    "decoder": Rung("Decoder in the Gateway's process", {"members": "deployment"}, BUSY),
    "members": Rung("members in the Gateway's process, by turns", {}, BUSY),
    "rest": Rung("Serve's intervals at rest", {}, TOLD),
    "silent": Rung("Serve told of no request: what is served now"),
    "combiner": Rung("instead: the Combiner a deployment", {"combiner": "deployment"}),
    "sizes-1-4": Rung("instead: batch sizes 1, 4", {"batch_sizes": [1, 4]}),
    "sizes-1-2-4": Rung("instead: batch sizes 1, 2, 4", {"batch_sizes": [1, 2, 4]}),
    "sizes-1-3-8": Rung("instead: batch sizes 1, 3, 8", {"batch_sizes": [1, 3, 8]}),
    "sizes-1-2-4-8": Rung("instead: batch sizes 1, 2, 4, 8", {"batch_sizes": [1, 2, 4, 8]}),
    "one-stream": Rung("instead: one batch at a time on all cores", {"streams": 1}),
    "decode-1": Rung("instead: one image decoded at a time", {"decode_threads": 1}),
}


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    only: Annotated[str, typer.Option(help="rungs, with commas")] = ",".join(list(RUNGS)[:8]),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure the rungs in turns."""
    bodies, names = photos_in(photos), only.split(",")
    bound = Bound(bodies)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rows[name].append(measure(RUNGS[name], bodies, bound, seconds))
            typer.echo(f"{name}: {rows[name][-1]}", err=True)
    result = {
        "machine": describe(),
        "rungs": [
            {
                "name": name,
                "change": RUNGS[name].change,
                **{key: round(median(r[key] for r in of), 3) for key in of[0] if key != "by_stage"},
                "rounds": of,
            }
            for name, of in rows.items()
        ],
    }
    write_result(result, out)


def measure(rung: Rung, bodies: list[bytes], bound: Bound, seconds: float) -> dict[str, Any]:
    """Start a variant, load it and return its figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        command = [TANDEM, "serve", "--config", str(config_of(rung, folder))]
        if rung.is_obvious:
            command = [sys.executable, str(ROOT / "tests" / "load" / "obvious.py")]
        service = stack.enter_context(running(command, rung.environment))
        root, target = psutil.Process(service.process.pid), Target(service.url, bodies)
        run_load(Load(target, WARM_UP_S, clients=16), None)
        before = bound.measure(seconds)
        many = summarise(run_load(Load(target, seconds, clients=16), root), 100)
        after = bound.measure(seconds)
        one = summarise(run_load(Load(target, seconds / 2, clients=1), root), 100)
    around = (before + after) / 2
    return {
        "share": round(many.images_per_s / around, 4),
        "bound_images_per_s": round(around, 2),
        "images_per_s": many.images_per_s,
        "cpu_ms_per_image": many.service_cpu_ms,
        "one_client_p50_ms": one.p50_ms,
        "by_stage": many.service_cpu_ms_by_stage,
    }


def config_of(rung: Rung, folder: Path) -> Path:
    """Write the configuration of a variant; ``fitted_to`` drops what it has no use for."""
    content = yaml.safe_load((ROOT / "configs" / "separate.yaml").read_text("utf-8"))
    application = content["applications"][0]
    application["args"] = {"model_set": "imagenette", **rung.args}
    if rung.args.get("combiner") == "deployment":
        options = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0.1}}
        application["deployments"].append({"name": "Combiner", **options})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


if __name__ == "__main__":
    typer.run(main)
