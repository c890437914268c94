"""Three callers of one service: ``python tests/load/callers.py PHOTOS``.

A service with three keys: ``flood`` asks for FLOOD times what the service carries, ``tight`` allows
200 ms a request, and ``idle`` asks now and then. Turns, each of ``--seconds``:

- what the service carries (16 clients in a closed loop, with the key ``flood``);
- ``idle`` and ``tight`` alone, at shares of that rate;
- all three together: the p99 of ``idle`` as a multiple of its value alone, and the share of
  ``tight`` that misses its time, refusals included;
- one key: 64 clients in a closed loop allow 5 s, and as many as ``tight`` sends allow 200 ms.

Of ``idle`` the p50 and p99 of each stage are kept, by the answers' own timings: of members the
slower one's, and ``elsewhere`` what is in no answer (HAProxy, the network, waits of the generator).

``--apart`` gives the load the last core and the services the others. ``--also-tandem`` measures
another checkout in the same rounds, which must take files of keys. Prints JSON.
"""

import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from contestants import Other, all_running, tandems
from machine import describe, write_result
from running import Running

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import Run, TimedRequest, summarise

CLIENTS, CROWD = 16, 64
TIGHT_S, PATIENT_S = 0.2, 5.0
SETTLED_S = 2.0  # until the service has found out that it is overloaded, and by whom
CALM_S = 4.0  # between turns
TIMEOUT = "x-request-timeout-seconds"


@dataclass(frozen=True)
class Keys:
    """The keys by name, and the file that has them."""

    keys: dict[str, str]
    file: Path

    @classmethod
    def write(cls, folder: Path) -> "Keys":
        keys = {name: secrets.token_hex(16) for name in ("flood", "tight", "idle")}
        file = folder / "keys"
        file.touch(0o600)
        file.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()), "ascii")
        return cls(keys, file)


@dataclass(frozen=True)
class Asking:
    """How one caller asks: as ``name``, with a time limit, at a rate or with so many clients."""

    name: str
    timeout_s: float = PATIENT_S
    rate: float = 0.0
    clients: int = 0


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=4)] = 15.0,
    idle: Annotated[float, typer.Option(help="its rate, as a share of what is carried")] = 0.2,
    tight: Annotated[float, typer.Option(help="its rate, as a share of what is carried")] = 0.1,
    flood: Annotated[float, typer.Option(help="its rate, in times what is carried")] = 3.0,
    apart: Annotated[bool, typer.Option("--apart", help="the load on a core of its own")] = False,
    model_set: Annotated[str, typer.Option("--set", help="name or folder")] = "imagenette",
    also_tandem: Annotated[
        list[str], typer.Option(help="BIN:FOLDER, the tandem of another checkout")
    ] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure in turns, each service at rest but for the one whose turn it is."""
    bodies, rows = photos_in(photos), list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        keys = Keys.write(Path(folder))
        contestants = [
            replace(one, command=[*one.command, "--api-keys-file", str(keys.file)])
            for one in tandems("tandem", model_set, None, [Other.parse(one) for one in also_tandem])
        ]
        cores = sorted(os.sched_getaffinity(0))
        if apart:
            os.sched_setaffinity(0, cores[:-1])
        with all_running(contestants) as services:
            if apart:
                os.sched_setaffinity(0, cores[-1:])
            turns = Turns(bodies, keys, seconds)
            for service in services.values():
                turns.play(service, [Asking("flood", clients=CLIENTS)])
            for number in range(rounds):
                for name, service in services.items():
                    measured = turns.one_round(service, idle, tight, flood)
                    rows.append({"service": name, **measured})
                    typer.echo(f"round {number + 1} of {rounds}, {name}: {measured}", err=True)
    names = ("idle_p99_times_alone", "tight_missed", "tight_missed_of_one_key")
    medians = {
        service: {
            name: round(median(row[name] for row in rows if row["service"] == service), 4)
            for name in names
        }
        for service in services
    }
    write_result({"machine": describe(), "medians": medians, "rounds": rows}, out)


class Turns:
    """Plays callers at a service, all at once, each from a process of its own."""

    def __init__(self, bodies: Sequence[bytes], keys: Keys, seconds: float) -> None:
        self._bodies, self._keys, self._seconds = bodies, keys, seconds

    def one_round(
        self, service: Running, idle: float, tight: float, flood: float
    ) -> dict[str, Any]:
        """Return the figures of a round."""
        (carried,) = self.play(service, [Asking("flood", clients=CLIENTS)])
        rate = carried["throughput"]
        asks_now = Asking("idle", rate=idle * rate)
        in_haste = Asking("tight", TIGHT_S, rate=tight * rate)
        (idle_alone,) = self.play(service, [asks_now])
        (tight_alone,) = self.play(service, [in_haste])
        flooding = Asking("flood", rate=flood * rate)
        beside = self.play(service, [asks_now, in_haste, flooding])
        crowd = Asking("tight", clients=CROWD)
        of_one_key = self.play(service, [in_haste, crowd])
        return {
            "idle_p99_times_alone": round(beside[0]["p99_ms"] / idle_alone["p99_ms"], 3),
            "idle_p50_times_alone": round(beside[0]["p50_ms"] / idle_alone["p50_ms"], 3),
            "tight_missed": beside[1]["missed"],
            "tight_missed_of_one_key": of_one_key[0]["missed"],
            "carried": carried,
            "alone": {"idle": idle_alone, "tight": tight_alone},
            "together": dict(zip(("idle", "tight", "flood"), beside, strict=True)),
            "of_one_key": dict(zip(("tight", "patient"), of_one_key, strict=True)),
        }

    def play(self, service: Running, callers: Sequence[Asking]) -> list[dict[str, Any]]:
        """Return the figures of each caller."""
        time.sleep(CALM_S)
        loads = [
            Load(self._target(service, one), self._seconds, one.clients, one.rate, seed=n)
            for n, one in enumerate(callers)
        ]
        with ThreadPoolExecutor(len(loads)) as pool:
            runs = list(pool.map(lambda load: run_load(load, None), loads))
        return [_figures(run, one) for run, one in zip(runs, callers, strict=True)]

    def _target(self, service: Running, asking: Asking) -> Target:
        key = self._keys.keys[asking.name]
        headers = {"authorization": f"Bearer {key}", TIMEOUT: str(asking.timeout_s)}
        return Target(service.url, self._bodies, headers=headers, keeps_answers=True)


def _figures(run: Run, asking: Asking) -> dict[str, Any]:
    """Return the figures of the requests from ``SETTLED_S`` on."""
    samples = [sample for sample in run.samples if sample.scheduled >= SETTLED_S]
    left_s = run.duration_s - SETTLED_S
    told = summarise(
        replace(run, samples=samples, began_s=SETTLED_S, duration_s=left_s), asking.timeout_s * 1e3
    )
    num = max(1, told.num_requests)
    return {
        "offered": round(told.num_requests / left_s, 1),
        "throughput": told.throughput,
        "p50_ms": told.p50_ms,
        "p99_ms": told.p99_ms,
        "missed": round(1 - told.num_good / num, 4),
        "refused": round(told.errors.get("http_429", 0) / num, 4),
        "errors": told.errors,
        **({"stages_ms": _stages_ms(samples)} if asking.name == "idle" else {}),
    }


def _stages_ms(samples: Sequence[TimedRequest]) -> dict[str, list[float]]:
    """Return the p50 and p99 of each stage, of a request's equal ones the longest."""
    took = defaultdict[str, list[float]](list)
    for sample in samples:
        if sample.answer is not None:
            timings, longest = json.loads(sample.answer[1])["timings_ms"], dict[str, float]()
            for stage in timings["stages"]:
                name = stage["stage"]
                longest[name] = max(longest.get(name, 0.0), stage["duration_ms"])
            total = timings["total"]
            for name, ms in {
                **longest,
                "total": total,
                "elsewhere": sample.latency_ms - total,
            }.items():
                took[name].append(ms)
    return {
        name: [round(sorted(of)[int(share * len(of))], 1) for share in (0.5, 0.99)]
        for name, of in took.items()
    }


if __name__ == "__main__":
    typer.run(main)
