"""The search space: ways to divide the cores among replicas and streams, with batch sizes."""

from dataclasses import dataclass
from itertools import zip_longest

# Each is a prefix of the next: a process that compiled the last forms exactly the sizes of any, if
# its largest batch size is limited (app/tune/trials.py).
BATCH_SIZES = ((1,), (1, 3), (1, 3, 8), (1, 3, 8, 16))
FEW_BATCH_SIZES = ((1,), (1, 3, 8))  # if there are too many layouts for all four
MAX_REPLICAS = 8  # each holds its own networks
MAX_CANDIDATES = 24


@dataclass(frozen=True, order=True)
class ReplicaLayout:
    """How the cores are divided; another layout needs new processes, with compilation."""

    replicas: int
    cores: int  # of each replica
    streams: int  # batches at a time in each replica

    @property
    def threads(self) -> int:
        """The cores that work on a batch."""
        return self.cores // self.streams

    def __str__(self) -> str:
        return (
            f"{_count(self.replicas, 'replica')} of {_count(self.cores, 'core')}, "
            f"{_count(self.streams, 'stream')} of {_count(self.threads, 'thread')}"
        )


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout and the batch sizes that its queues form."""

    layout: ReplicaLayout
    batch_sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.layout}; batches of {', '.join(map(str, self.batch_sizes))}"

    def reachable(self, clients: int) -> tuple[int, ...]:
        """Return the batch sizes that this many clients can fill; larger sizes have no effect."""
        most = -(-clients // self.layout.replicas)
        return tuple(size for size in self.batch_sizes if size <= most)


def candidates(cores: int) -> list[Candidate]:
    """Return the candidates worth trying on ``cores`` cores, at most ``MAX_CANDIDATES``."""
    machine_layouts = layouts(cores)
    sizes = (
        BATCH_SIZES
        if len(machine_layouts) * len(BATCH_SIZES) <= MAX_CANDIDATES
        else FEW_BATCH_SIZES
    )
    machine_layouts = machine_layouts[: MAX_CANDIDATES // len(sizes)]
    return [Candidate(layout, of) for layout in sorted(machine_layouts) for of in sizes]


def layouts(cores: int) -> list[ReplicaLayout]:
    """Return all ways to divide the cores evenly, the most promising first.

    First comes a stream per core, best for throughput, then a single stream on all cores, best for
    a lone image. Then come those between, powers of two before other divisors.
    """
    replicas = sorted(
        (n for n in range(1, min(cores, MAX_REPLICAS) + 1) if cores % n == 0), key=_oddness
    )
    by_replicas = [
        [ReplicaLayout(n, cores // n, s) for s in _streams(cores // n)] for n in replicas
    ]
    return [layout for row in zip_longest(*by_replicas) for layout in row if layout is not None]


def client_counts(cores: int) -> list[int]:
    """Return the numbers of clients to try: from one, over one per core, to overload."""
    return sorted({1, *(cores * factor for factor in (1, 2, 4, 8, 16))})


def _streams(cores: int) -> list[int]:
    between = [n for n in range(cores - 1, 1, -1) if cores % n == 0]
    return list(dict.fromkeys([cores, 1, *sorted(between, key=lambda n: _oddness(cores // n))]))


def _oddness(number: int) -> tuple[bool, int]:
    """Sort powers of two before other numbers, small before large."""
    return number & (number - 1) != 0, number


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
