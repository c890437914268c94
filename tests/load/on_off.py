"""What a setting brings: two services, one with it on and one with it off, take turns under load.

They are started several times: one start of the same service is up to 5 % faster than another.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
import yaml
from machine import ROOT, describe, process_tree, pss_mb
from null_set import small_photos, write_null_set
from running import TANDEM, Running, running

from app.bench.client import Target
from app.bench.generator import run_load
from app.bench.load import Load, photos_in
from app.bench.samples import summarise

# What the commands take.
Photos = Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)]
Starts = Annotated[int, typer.Option(help="of both services", min=1)]
Rounds = Annotated[int, typer.Option(help="of each start", min=1)]
Seconds = Annotated[float, typer.Option(help="of each turn", min=1)]
Result = Annotated[Path, typer.Option("--json", help="write the result here")]

FIGURES = ("images_per_s", "p50_ms", "p99_ms", "cpu_ms")
ON, OFF = "on", "off"
WARM_S = 6.0  # of the largest crowd, before the turns: what a service makes when it is first needed


@dataclass(frozen=True)
class Turns:
    """What a comparison does."""

    setting: str  # of app/settings.py
    clients: Sequence[int]
    starts: int  # of both services
    rounds: int  # of each start
    seconds: float  # of each turn
    values: tuple[Any, Any] = (True, False)  # on, and off

    def facts(self) -> dict[str, Any]:
        """Return how it is measured: the machine, and how often."""
        often = {"starts": self.starts, "rounds": self.rounds, "seconds": self.seconds}
        return {"machine": describe(), **often}

    def compared(self, bodies: list[bytes], folder: Path, model_set: str) -> dict[str, Any]:
        """Return the medians of both services by the number of clients, and how they compare.

        ``folder`` takes their configurations.
        """
        rows: dict[tuple[int, str], list[dict[str, float]]] = {}
        memory: dict[str, list[float]] = {ON: [], OFF: []}
        for start in range(self.starts):
            with ExitStack() as stack:
                services = {
                    name: stack.enter_context(self._service(folder, name, model_set))
                    for name in memory
                }
                for service in services.values():
                    turn(service, bodies, max(self.clients), WARM_S)
                for clients, name in self._order():
                    row = turn(services[name], bodies, clients, self.seconds)
                    rows.setdefault((clients, name), []).append(row)
                    typer.echo(f"start {start + 1}: {clients} {name} {row}", err=True)
                for name, service in services.items():
                    memory[name].append(pss(service))
        return {
            "clients": {str(clients): shares(rows, clients) for clients in self.clients},
            "pss_mb": {name: round(median(of)) for name, of in memory.items()},
        }

    def with_both_sets(self, photos: Path) -> dict[str, Any]:
        """Return the comparison with the bundled networks, and with those that cost nothing."""
        with tempfile.TemporaryDirectory() as name:
            folder, bodies = Path(name), photos_in(photos)
            null = write_null_set(folder / "null")
            return {
                "bundled": self.compared(bodies, folder, "imagenette"),
                "null": self.compared(small_photos(bodies), folder, str(null)),
            }

    def _order(self) -> list[tuple[int, str]]:
        """Return whose turn it is; who is first of a pair varies."""
        return [
            (clients, name)
            for number in range(self.rounds)
            for clients in self.clients
            for name in ((OFF, ON) if number % 2 else (ON, OFF))
        ]

    def _service(
        self, folder: Path, name: str, model_set: str
    ) -> contextlib.AbstractContextManager[Running]:
        """Return serve_config.yaml with the setting, to be started."""
        shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
        on, off = self.values
        shipped["applications"][0]["args"][self.setting] = on if name == ON else off
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(shipped), "utf-8")
        command = [TANDEM, "serve", "--config", str(path), "--model-set", model_set]
        return running(command)


def shares(
    rows: dict[tuple[int, str], list[dict[str, float]]], clients: int
) -> dict[str, dict[str, float] | float]:
    """Return the medians of both at a number of clients, and the share of one to the other."""
    of = {
        name: {f: round(median(row[f] for row in rows[clients, name]), 2) for f in FIGURES}
        for name in (ON, OFF)
    }
    share = of[ON]["images_per_s"] / of[OFF]["images_per_s"]
    return {**of, "share": round(share, 3)}


def turn(service: Running, bodies: list[bytes], clients: int, seconds: float) -> dict[str, float]:
    """Load one of them, while the other rests."""
    load = Load(Target(service.url, bodies), seconds, clients=clients)
    told = summarise(run_load(load, psutil.Process(service.process.pid)), 1e4)
    assert told.service_cpu_ms is not None
    return {
        "images_per_s": told.images_per_s,
        "p50_ms": told.p50_ms,
        "p99_ms": told.p99_ms,
        "cpu_ms": told.service_cpu_ms,
    }


def pss(service: Running) -> float:
    """Return MB of all its processes."""
    return round(sum(pss_mb(process_tree(service.process.pid)).values()), 1)
