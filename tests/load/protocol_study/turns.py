"""The turns of the study: every way at every load, interleaved by round."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import typer

from protocol_study.generator import Generator, Sent, Turn
from protocol_study.senders import PAYLOADS
from protocol_study.usage import Service, Utilisation, cpu_ms
from protocol_study.ways import SendError, Way

BATCHES = (1, 4, 16, 64)
CLIENTS = (1, 4, 16, 64)
MANY = 16  # clients where the connections are compared, and whose rate is the capacity
SHARES = (0.25, 0.5, 0.75, 0.9)  # of the capacity, as Poisson arrivals
CAPACITY = Way("HTTP raw", "jpeg")
SECTIONS = ("clients", "batch", "connections", "arrivals")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row of the study: a way, and how it is loaded."""

    section: str
    way: Way
    clients: int = 0
    share: float = 0.0  # of the capacity

    @property
    def key(self) -> Row:
        return {
            "section": self.section,
            **asdict(self.way),
            "clients": self.clients,
            "share": self.share,
        }


def ways() -> list[Way]:
    """Return every protocol with every payload that it carries."""
    return [Way(protocol, payload) for protocol, each in PAYLOADS.items() for payload in each]


def cases(sections: Sequence[str]) -> Iterator[Case]:
    """Return the rows of the study."""
    for way in ways():
        batched = [
            Way(way.protocol, way.payload, batch) for batch in BATCHES if way.protocol != "HTTP raw"
        ]
        if "clients" in sections:
            yield from (Case("clients", way, clients) for clients in CLIENTS)
        if "batch" in sections:
            yield from (Case("batch", each, 1) for each in batched)
        if "connections" in sections:
            new = Way(way.protocol, way.payload, is_kept=False)
            yield from (Case("connections", new, clients) for clients in (1, MANY))
        if "arrivals" in sections:
            yield from (Case("arrivals", way, share=share) for share in SHARES)


class Study:
    """Measures cases in turns, a whole round after the other."""

    def __init__(self, generator: Generator, service: Service, seconds: float) -> None:
        self._generator, self._service, self._seconds = generator, service, seconds
        self._refused: dict[Way, str] = {}

    def capacity(self) -> float:
        """Return images/s that 16 clients get; the service is warm then."""
        found = []
        for seconds in (self._seconds, 2 * self._seconds):
            turn = Turn(CAPACITY, seconds, clients=MANY)
            found.append(self._measure(turn)["images_per_s"])
        return float(found[-1])

    def rounds(self, number: int, chosen: Iterable[Case], capacity: float) -> list[Row]:
        """Return the median over the rounds of each case's figures."""
        all_cases = list(chosen)
        turns: dict[Case, list[Row]] = {case: [] for case in all_cases}
        for index in range(number):
            shuffled = random.Random(index).sample(all_cases, len(all_cases))
            for place, case in enumerate(shuffled):
                row = self._turn(case, capacity, index)
                turns[case].append(row)
                done = f"round {index + 1} of {number}, {place + 1} of {len(shuffled)}"
                typer.echo(f"{done}: {_short(case, row)}", err=True)
        return [case.key | medians(rows) for case, rows in turns.items()]

    def _turn(self, case: Case, capacity: float, seed: int) -> Row:
        if case.way in self._refused:
            return {"refused": self._refused[case.way]}
        rate = case.share * capacity
        try:
            return self._measure(Turn(case.way, self._seconds, case.clients, rate, seed))
        except SendError as error:  # it does not take such requests: that is the row
            self._refused[case.way] = f"{error.kind}: {error}"
            return {"refused": self._refused[case.way]}

    def _measure(self, turn: Turn) -> Row:
        watched: list[Utilisation] = []

        def snapshot() -> Any:
            if not watched:
                self._service.watts()
                watched.append(Utilisation())
            return self._service.snapshot()

        try:
            sent, before, after = self._generator.run(turn, snapshot)
        finally:
            utilisation = watched[0].end() if watched else {}
        images = len(sent.latencies_ms) * turn.way.batch
        return {
            **figures(sent, images),
            **cpu_ms(before, after, images),
            **utilisation,
            "memory_mb": self._service.memory_mb(),
            "watts": self._service.watts(),
        }


def figures(sent: Sent, images: int) -> Row:
    """Return the figures of a turn that the client sees."""
    if not sent.latencies_ms:
        raise SystemExit(f"nothing was answered: {sent.errors}: {sent.why}")
    found = np.percentile(sent.latencies_ms, (50, 95, 99))
    return {
        "images_per_s": round(images / sent.seconds, 2),
        **{f"p{q}_ms": round(float(v), 2) for q, v in zip((50, 95, 99), found, strict=True)},
        "client_cpu_ms": round(sent.client_cpu_s / images * 1e3, 3),
        "errors": sum(sent.errors.values()),
    }


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of each figure, and of figures within a figure."""
    told: Row = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if isinstance(value, dict):
            told[name] = medians(values)
        elif isinstance(value, str):
            told[name] = value
        else:
            told[name] = round(median(values), 3) if values else None
    return told


def _short(case: Case, row: Row) -> str:
    load = f"{case.clients} clients" if case.clients else f"{case.share:.0%}"
    told = {k: row[k] for k in ("images_per_s", "p50_ms", "server_cpu_ms", "refused") if k in row}
    return f"{case.section}, {case.way.name}, batch {case.way.batch}, {load}: {told}"
