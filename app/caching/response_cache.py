"""The cache of one process: what was answered, and what is being computed."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from app.caching.flights import Flight, Flights
from app.caching.redis_store import RedisStore
from app.caching.s3_fifo import S3Fifo
from app.caching.values import Outcome, Rows
from app.messages import Fault
from app.queueing.priority import Lane

CACHE_CONTROL = "cache-control"
# use: read and store; renew: store, do not read (no-cache); off: neither (no-store).
CacheUse = Literal["use", "renew", "off"]
ImageFlight = Flight[Outcome | Fault]


class Found(NamedTuple):
    """What there is of a key: rows, or a computation, which is the caller's own or another's."""

    rows: Rows | None = None
    flight: ImageFlight | None = None
    is_own: bool = False


class ResponseCache:
    """Keeps rows by key, at most ``max_bytes`` of memory; for one event loop.

    What is not here may be in ``shared``, if there is one, and is written there as well.
    """

    def __init__(self, max_bytes: int, shared: RedisStore | None = None) -> None:
        self._shared = shared
        self._store: S3Fifo[Rows] = S3Fifo(max_bytes)
        self._flights: Flights[Outcome | Fault] = Flights()

    @property
    def num_bytes(self) -> int:
        """The memory that is taken."""
        return self._store.num_bytes

    def take_evicted(self) -> int:
        """Return how many images' rows have had to go since this was last asked."""
        number, self._store.num_evicted = self._store.num_evicted, 0
        return number

    def look(self, key: bytes, lane: Lane) -> Found:
        """Return what is kept; or else what to wait for, or what the caller is to compute.

        Who is given a computation of its own must :meth:`end` it, whatever happens.
        """
        if (rows := self.read(key)) is not None:
            return Found(rows)
        joined = self._flights.join(key, lane)
        return Found(None, joined.flight, joined.is_own)

    def read(self, key: bytes) -> Rows | None:
        """Return what is kept of a key."""
        return self._store.get(key)

    def keep(self, key: bytes, rows: Rows) -> None:
        """Keep an image's rows, which are not to be written to any more."""
        self._store.put(key, rows, rows.nbytes)
        if self._shared is not None:
            self._shared.write(key, rows)

    async def fetch(self, flights: Mapping[int, ImageFlight | None]) -> dict[int, Rows]:
        """Return what others kept, for computations of the caller's own, by their numbers.

        Those computations are ended with it. One that is None is to be done in any case.
        """
        wanted = {number: flight for number, flight in flights.items() if flight is not None}
        if self._shared is None or not wanted:
            return {}
        found = await self._shared.read([flight.key for flight in wanted.values()])
        fetched = {}
        for (number, flight), rows in zip(wanted.items(), found, strict=True):
            if rows is not None:
                fetched[number] = rows
                self._store.put(flight.key, rows, rows.nbytes)
                self.end(flight, Outcome(rows))
        return fetched

    def end(
        self, flight: ImageFlight, outcome: Outcome | Fault | None = None, *, answered: bool = False
    ) -> None:
        """End a computation of one's own, for all that wait for it.

        Args:
            flight: the computation; if it has ended, nothing happens.
            outcome: what came of it; None: nothing that others may have.
            answered: without an outcome, whether the caller's request had an answer of its own.
                Those that wait then compute, all at once; else the first takes over.

        """
        self._flights.end(flight, outcome, was_answered=answered)


def cache_use_of(cache_control: str | None) -> CacheUse:
    """Return what a client allows; directives that are not known say nothing."""
    if not cache_control:
        return "use"
    parts = cache_control.lower().split(",")
    directives = {part.partition("=")[0].strip() for part in parts}
    if "no-store" in directives:
        return "off"
    return "renew" if "no-cache" in directives else "use"
