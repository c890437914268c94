"""The ensemble behind the response cache: repeated images are not computed again.

The cache comes before the Decoder, so that a hit costs a hash of the file and the ordering of its
classes. Each file is looked up separately; the misses go through the ensemble together.
"""

from collections import Counter

from app.answers import Classified, Fault
from app.environment import MIB
from app.graph.availability import Graph
from app.graph.ensemble import Ensemble
from app.graph.redis_cache import FORMAT, ImageKeys, Outcome, RedisStore, Rows, RowsFormat
from app.graph.request import ClassifyRequest, ImageFlight, RequestAnswers, ResponseCache, RowStore
from app.setting_values import RedisAddress
from app.settings import Settings
from app.stages.own_functions import identities
from app.telemetry.metrics import Interval, record_lookups, record_redis, record_state
from models.model_set import ModelSet


def with_cache(
    ensemble: Ensemble, settings: Settings, model_set: ModelSet, store: RowStore | None = None
) -> Graph:
    """Return the graph that answers requests: the ensemble itself if the settings name no cache.

    ``store`` is the memory that the caches of a set's versions share; their keys differ.
    """
    if settings.cache == "none":
        return ensemble
    keys = ImageKeys(settings, model_set, identities(settings, model_set.manifest))
    shared = None
    if settings.cache != "local":
        num = len(ensemble.member_names)
        # An entry with the operator's combine has a row more; one of a fast plan may have fewer.
        nums_rows = tuple(range(1, num + 1)) if ensemble.fast else (num + (not ensemble.averages),)
        form = RowsFormat(keys.fingerprint, nums_rows, model_set.manifest.num_classes)
        prefix = f"tandem:{FORMAT}:{keys.fingerprint}:"
        shared = RedisStore(RedisAddress.of(settings.cache), form, prefix, record_redis)
    cache = ResponseCache(settings.cache_mib * MIB, shared, store)
    return CachedEnsemble(ensemble, cache, keys)


class CachedEnsemble:
    """Answers files from ``cache``, and sends the misses to ``ensemble``."""

    def __init__(self, ensemble: Ensemble, cache: ResponseCache, keys: ImageKeys) -> None:
        self.ensemble, self.cache, self.keys = ensemble, cache, keys

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer every file, in order; see :meth:`Ensemble.run`."""
        # The cache has answers of the ensemble to files, not to pixels, nor of single members. It
        # has no embeddings.
        is_other = request.is_probe or request.embedding is not None
        if is_other or request.cache_use == "off" or not request.is_of_files:
            return await self.ensemble.run(request)
        return await _Run(self, request).answers()


class _Run:
    """The state of one request; files are numbered by their place in it."""

    def __init__(self, graph: CachedEnsemble, request: ClassifyRequest) -> None:
        self._graph, self._cache, self._request = graph, graph.cache, request
        self._answers: dict[int, Classified | Fault] = {}
        self._keys: list[bytes] = []
        self._start_ms = 0.0  # of the lookup
        self._is_noted = False
        self._lookups: dict[int, str] = {}
        # Files that this request computes even if another request computes them too.
        self._alone: set[int] = set()
        if request.cache_use == "renew":
            self._alone = set(range(len(request.files)))

    async def answers(self) -> RequestAnswers:
        """Return the answers, in one round or more.

        A second round is for files that another request computed without a result.
        """
        observer, files = self._request.observer, self._request.files
        self._start_ms = observer.elapsed_ms()
        self._keys = await self._graph.keys.of(files, self._request.plan)
        left = list(range(len(files)))
        try:
            while left:
                left = await self._round(left)
            self._end_lookup()
        finally:
            record_lookups(Counter(self._lookups.values()))
        record_state(self._cache.num_bytes, self._cache.take_evicted())
        return [self._answers[place] for place in range(len(files))]

    async def _round(self, left: list[int]) -> list[int]:
        """Answer as many files as possible; return those that another request did not compute."""
        own: dict[int, ImageFlight | None] = {}
        others: dict[int, ImageFlight] = {}
        hits = self._look_up(left, own, others)
        try:
            hits |= await self._cache.fetch(own)
            misses = {place: flight for place, flight in own.items() if place not in hits}
            self._lookups |= dict.fromkeys(hits, "hit") | dict.fromkeys(misses, "miss")
            self._lookups |= dict.fromkeys(others, "shared")
            for place, rows in hits.items():
                self._answer(place, Outcome(rows))
            if misses:
                self._end_lookup()
                await self._compute(misses)
        finally:  # files without an answer may be computed by another request
            for flight in own.values():
                if flight is not None:
                    self._cache.end(flight)
        return [place for place, flight in others.items() if not await self._share(place, flight)]

    def _look_up(
        self, left: list[int], own: dict[int, ImageFlight | None], others: dict[int, ImageFlight]
    ) -> dict[int, Rows]:
        """Return the hits by place; fill ``own`` with files to compute, ``others`` with the rest.

        The rest are files that another request is computing.
        """
        hits = {}
        for place in left:
            if place in self._alone:
                own[place] = None
                continue
            key = self._keys[place]
            if (rows := self._cache.read(key)) is not None:
                hits[place] = rows
                continue
            flight, is_new = self._cache.join(key, self._request.lane)
            (own if is_new else others)[place] = flight
        return hits

    async def _compute(self, own: dict[int, ImageFlight | None]) -> None:
        """Compute files, cache complete answers, and notify requests that wait for them."""
        request = self._request
        if len(own) < len(request.files):
            request = request._replace(files=[request.files[place] for place in own])
        ensemble = self._graph.ensemble
        computed = await ensemble.compute(request)
        answers = ensemble.answers(request, computed)
        outcomes = ensemble.outcomes(request, computed)
        for number, (place, flight) in enumerate(own.items()):
            self._answers[place] = answers[number]
            outcome = outcomes.get(number)
            if isinstance(outcome, Outcome) and not outcome.missing:
                self._cache.keep(self._keys[place], outcome.rows)
            if flight is not None:
                self._cache.end(flight, outcome, answered=True)

    async def _share(self, place: int, flight: ImageFlight) -> bool:
        """Answer a file with the result of another request; return False if it has none."""
        await flight.ended.wait()
        if flight.value is not None:
            self._answer(place, flight.value)
            return True
        if flight.was_answered:
            self._alone.add(place)
        return False

    def _answer(self, place: int, outcome: Outcome | Fault) -> None:
        if isinstance(outcome, Fault):
            self._answers[place] = outcome
            return
        observer = self._request.observer
        caching = Interval(self._start_ms, observer.elapsed_ms())
        timings = observer.timings_of_cached(caching)
        self._answers[place] = self._graph.ensemble.answer_of(outcome, self._request, timings)

    def _end_lookup(self) -> None:
        """End the interval of the cache lookup, once, and record hits and misses."""
        if self._is_noted:
            return
        self._is_noted = True
        counts = Counter(self._lookups.values())
        attributes = {f"tandem.cache.{name}": counts[name] for name in ("hit", "miss", "shared")}
        self._request.observer.stage_ended("cache", self._start_ms, attributes)
