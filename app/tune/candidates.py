"""The search space: ways to divide the cores among replicas and streams, with batch sizes."""

from dataclasses import dataclass
from itertools import zip_longest

# Each begins with the one before: a process that compiled the last forms exactly the sizes of any,
# when it is told the largest (app/tune/trials.py).
BATCH_SIZES = ((1,), (1, 3), (1, 3, 8), (1, 3, 8, 16))
FEW_BATCH_SIZES = ((1,), (1, 3, 8))  # where there are too many layouts for all four
MAX_REPLICAS = 8  # each holds the networks once more
MAX_CANDIDATES = 24


@dataclass(frozen=True, order=True)
class ReplicaLayout:
    """How the cores are shared; changing it means new processes, compiled anew."""

    replicas: int
    cores: int  # of each replica
    streams: int  # batches at a time in each replica

    @property
    def threads(self) -> int:
        """Cores that work on one batch."""
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
        """Return the batch sizes that so many clients can fill; larger ones change nothing."""
        most = -(-clients // self.layout.replicas)
        return tuple(size for size in self.batch_sizes if size <= most)


def candidates(cores: int) -> list[Candidate]:
    """Return what is worth trying on ``cores`` cores, at most ``MAX_CANDIDATES``."""
    found = layouts(cores)
    sizes = BATCH_SIZES if len(found) * len(BATCH_SIZES) <= MAX_CANDIDATES else FEW_BATCH_SIZES
    found = found[: MAX_CANDIDATES // len(sizes)]
    return [Candidate(layout, of) for layout in sorted(found) for of in sizes]


def layouts(cores: int) -> list[ReplicaLayout]:
    """Return every way to share the cores without a rest, the likeliest to be good first.

    That is one stream a core, which is best for throughput, then one stream of all cores, best for
    a lone image, then what lies between; powers of two before other divisors.
    """
    replicas = sorted(
        (n for n in range(1, min(cores, MAX_REPLICAS) + 1) if cores % n == 0), key=_oddness
    )
    by_replicas = [
        [ReplicaLayout(n, cores // n, s) for s in _streams(cores // n)] for n in replicas
    ]
    return [layout for row in zip_longest(*by_replicas) for layout in row if layout is not None]


def client_counts(cores: int) -> list[int]:
    """Return the numbers of clients: one alone, then from one a core to far too many."""
    return sorted({1, *(cores * factor for factor in (1, 2, 4, 8, 16))})


def _streams(cores: int) -> list[int]:
    between = [n for n in range(cores - 1, 1, -1) if cores % n == 0]
    return list(dict.fromkeys([cores, 1, *sorted(between, key=lambda n: _oddness(cores // n))]))


def _oddness(number: int) -> tuple[bool, int]:
    """Sort powers of two before other numbers, small before large."""
    return number & (number - 1) != 0, number


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
