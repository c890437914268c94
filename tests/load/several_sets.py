"""Two sets of one service on the same cores: ``python tests/load/several_sets.py PHOTOS``.

Each set is loaded alone, then both together: rates, latencies and the service's CPU time an image.
Then the first set has a crowd and the second a single client, which fairness is about. At last both
have as many clients, with several weights of the second: which share of the cores' time each gets,
by the cost of its images alone. Prints JSON.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
import yaml
from lean_load import run_lean
from machine import ROOT, describe, write_result
from running import Running, running_service

from app.bench.load import Load, Target, photos_in
from app.bench.measurement import Run, cpu_seconds, summarise

OBJECTIVE_MS = 1000.0
WEIGHTS = (1.0, 3.0)  # of the second set; the first has 1, the default


@dataclass(frozen=True)
class SetTarget(Target):
    """Asks for one set by its name."""

    model_set: str = ""

    @property
    def path(self) -> str:
        return f"{super().path}&model_set={self.model_set}"


class Loads:
    """Closed loops for sets of a service, at the same time."""

    def __init__(self, service: Running, photos: Sequence[bytes], seconds: float) -> None:
        self._service, self._photos, self._seconds = service, photos, seconds

    def run(self, clients: Mapping[str, int]) -> dict[str, Any]:
        """Return each set's figures, and the service's CPU time over all of it."""
        root = psutil.Process(self._service.process.pid)
        before = sum(cpu_seconds(root).values())
        with ThreadPoolExecutor(len(clients)) as pool:
            runs = dict(zip(clients, pool.map(self._one, clients.items()), strict=True))
        cpu_ms = (sum(cpu_seconds(root).values()) - before) * 1e3
        answered = {name: sum(s.error is None for s in run.samples) for name, run in runs.items()}
        of_each = {name: self._figures(run) for name, run in runs.items()}
        return {"sets": of_each, "cpu_ms_per_image": round(cpu_ms / sum(answered.values()), 2)}

    def _one(self, asked: tuple[str, int]) -> Run:
        name, clients = asked
        target = SetTarget(self._service.url, self._photos, model_set=name)
        run, _, _ = run_lean(Load(target, self._seconds, clients), lambda: None)
        return run

    def _figures(self, run: Run) -> dict[str, Any]:
        figures = summarise(run, OBJECTIVE_MS).as_json()
        names = ("num_ok", "throughput", "p50_ms", "p99_ms", "errors")
        return {"clients": int(run.offered)} | {name: figures[name] for name in names}


def main(
    photos: Annotated[Path, typer.Argument()],
    model_sets: Annotated[str, typer.Option(help="two, by name or path")] = "imagenette,imagenet",
    seconds: Annotated[float, typer.Option(help="of each load")] = 10.0,
    clients: Annotated[int, typer.Option(help="of each set, and of both together")] = 16,
    crowd: Annotated[int, typer.Option(help="clients of the set with a crowd")] = 48,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure a service for each weight, one after the other."""
    bodies = photos_in(photos)
    paths = model_sets.split(",")
    first, second = (Path(path).name for path in paths)
    result: dict[str, Any] = describe() | {"seconds": seconds, "weights": {}}
    for weight in WEIGHTS:
        weights = {second: weight}
        with TemporaryDirectory() as folder, _serving(Path(folder), paths, weights) as service:
            loads = Loads(service, bodies, seconds)
            loads.run({first: clients, second: clients})  # batches for a backlog are compiled
            if weight == WEIGHTS[0]:
                result |= {
                    "alone": {name: loads.run({name: clients}) for name in (first, second)},
                    "one_client_alone": loads.run({second: 1}),
                    "one_client_beside_a_crowd": loads.run({first: crowd, second: 1}),
                }
            together = loads.run({first: clients, second: clients})
            together["shares"] = _shares(together, result["alone"])
            result["weights"][str(weight)] = together
    write_result(result, json_file)


def _serving(folder: Path, paths: Sequence[str], weights: Mapping[str, float]) -> Any:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    arguments = {"model_sets": list(paths), "set_weights": dict(weights)}
    config["applications"][0]["args"] = config["applications"][0].get("args", {}) | arguments
    config["applications"][0]["args"].pop("model_set", None)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return running_service("--config", str(path))


def _shares(together: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, float]:
    """Return each set's part of the CPU time, by what its images cost alone."""
    spent = {
        name: figures["num_ok"] * alone[name]["cpu_ms_per_image"]
        for name, figures in together["sets"].items()
    }
    return {name: round(ms / sum(spent.values()), 3) for name, ms in spent.items()}


if __name__ == "__main__":
    typer.run(main)
