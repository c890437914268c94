"""The graph: Decoder, then all members in parallel (or by a fast plan), then Combiner; its cache.

The operator's own functions (:mod:`app.stages.own_functions`) run between Decoder and members, and
in the Combiner.

The response cache comes before the Decoder, so that a hit costs a hash of the file and the ordering
of its classes. Each file is looked up separately; the misses go through the ensemble together.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.answers import Classified, Combined, Decoded, Fault, Timings, classified
from app.environment import MIB
from app.errors import UPDATING, OtherSetError
from app.graph.availability import Graph
from app.graph.members import (
    CombinerStage,
    DecoderStage,
    FastMembers,
    MemberResults,
    Members,
    MemberStage,
    ViewedMember,
    says_nothing_of_others,
)
from app.graph.redis_cache import FORMAT, ImageKeys, Outcome, RedisStore, Rows, RowsFormat
from app.graph.request import ClassifyRequest, ImageFlight, RequestAnswers, ResponseCache, RowStore
from app.graph.served_models import check_plan
from app.setting_values import RedisAddress
from app.settings import Settings
from app.stages.own_functions import OwnPreprocess, fingerprint_with, identities
from app.telemetry.metrics import Interval, record_lookups, record_redis, record_state
from models.ensemble import Probabilities, average
from models.model_set import ModelSet
from models.network import Pixels
from models.own_functions import load_function


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a request's files after each stage."""

    decoded: Decoded
    results: Sequence[MemberResults]
    combined: Sequence[Sequence[Combined]]  # for each of ``results``, one per image


class Ensemble:
    """Sends a request through the stages, which are in this process or deployments of their own."""

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet,
        decoder: DecoderStage,
        members: Mapping[str, MemberStage],
        combiner: CombinerStage,
    ) -> None:
        check_plan(settings, model_set)
        self._decoder, self._combiner = decoder, combiner
        self._name, self.member_names = model_set.name, tuple(members)
        self._rule = model_set.answer_rule
        self._fingerprint = model_set.fingerprint(settings.served_precision)
        inputs = model_set.manifest.inputs
        own_combine = load_function(settings.combine, "combine")  # the Combiner calls it
        self.averages = own_combine is None
        self._combined_fingerprint = fingerprint_with(self._fingerprint, own_combine)
        self._preprocess = OwnPreprocess.of(settings, model_set.manifest)
        if self._preprocess is not None and self._preprocess.num_views > 1:
            members = {name: ViewedMember(member) for name, member in members.items()}
        self.members = Members(
            members, inputs, self._fingerprint, settings.answer_policy, settings.member_patience_s
        )
        self._weights, self._trust = model_set.manifest.weights, model_set.trust
        self.fast: FastMembers | None = None
        plan = model_set.manifest.usable_plan(settings.served_precision)
        if plan is not None and self.averages:
            self.fast = FastMembers(plan, self.members, self._weights, settings.answer_policy)

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer every file, in order; a bad file is answered by a :class:`Fault`.

        Raises:
            OverloadedError, DeadlineError, NotReadyError: the whole request failed.
            OtherSetError: a stage serves another model set, during a rolling update.
        """
        return self.answers(request, await self.compute(request))

    async def compute(self, request: ClassifyRequest) -> Computed:
        """Send a request through Decoder, members and Combiner; raises as :meth:`run` does."""
        observer, tensors = request.observer, request.tensors
        start_ms = observer.elapsed_ms()
        if tensors is None or tensors.pixels is None:
            asked = (request.regions,) if request.regions else ()
            decoded = await self._decoder.decode(
                request.files, request.left_s, request.lane, *asked
            )
        else:
            decode_ms = (0.0,) * len(tensors.pixels)
            decoded = Decoded(tensors.pixels, {}, decode_ms, self._fingerprint)
        observer.timed("decode", start_ms)  # the Decoder records each file
        if decoded.model_set_fingerprint != self._fingerprint:
            raise OtherSetError(UPDATING)
        images = decoded.images
        if self._preprocess is not None and len(images):
            start_ms = observer.elapsed_ms()
            try:
                images = await self._preprocess.views(images)
            finally:
                observer.stage_ended("preprocess", start_ms)
        results = await self._ask_members(images, request)
        start_ms = observer.elapsed_ms()
        try:
            combined = [await self._combine(result, request) for result in results]
        finally:
            observer.stage_ended("combine", start_ms)
        return Computed(decoded, results, combined)

    def answers(self, request: ClassifyRequest, computed: Computed) -> RequestAnswers:
        """Return the answer of every file, in order, or its fault."""
        good, faults = self._answers_of_good(request, computed), computed.decoded.faults
        if not faults:
            return [*good]
        in_order = iter(good)
        return [faults.get(i) or next(in_order) for i in range(request.num_images)]

    def outcomes(self, request: ClassifyRequest, computed: Computed) -> dict[int, Outcome | Fault]:
        """Return the outcomes that other requests can share, by the file's place in this request.

        The rows are copies, in the order of ``member_names`` or of the fast plan. With the
        operator's own combine the ensemble's row follows them. Outcomes that depend on this request
        alone are left out.
        """
        faults = computed.decoded.faults
        outcomes: dict[int, Outcome | Fault] = {i: f for i, f in faults.items() if f.status < 500}
        good = [i for i in range(len(request.files)) if i not in faults]
        for result, images in zip(computed.results, computed.combined, strict=True):
            if says_nothing_of_others(result.missing):
                continue
            order = result.asked or self.member_names
            answered = [name for name in order if name in result.answers]
            for row, position in enumerate(result.images):
                rows = [result.answers[name].probabilities[row] for name in answered]
                if (own := images[row].row) is not None:
                    rows.append(own)
                outcomes[good[position]] = Outcome(np.stack(rows), result.missing)
        return outcomes

    def answer_of(self, outcome: Outcome, request: ClassifyRequest, timings: Timings) -> Classified:
        """Return the answer to an image whose outcome is cached or shared, with these timings."""
        rows, missing = outcome
        fast = self._fast_of(request)
        order = fast.plan.members if fast else self.member_names
        num_members = len(rows) if self.averages else len(rows) - 1
        answered = [name for name in order if name not in missing][:num_members]
        members = dict(zip(answered, rows[:num_members, None], strict=True))  # each (1, C)
        step = fast.plan.step_of(num_members) if fast and not missing else None
        trust = self._trust.of(members, step)
        mean = average(members, self._weights, trust.temperature)
        row = mean[0] if self.averages else rows[num_members]
        combined = Combined.of(
            row,
            {name: row[0] for name, row in members.items()},
            self._rule.asked(request.threshold),
            request.top_k,
            self._fingerprint,
            trust,
            is_row_kept=not self.averages,
            has_set=request.has_set,
        )
        known = members.keys() | missing.keys()
        answer = classified(
            combined,
            self._name,
            self._fingerprint,
            [name for name in self.member_names if name not in known],
            missing,
            request.request_id,
            timings,
            is_cached=True,
            probabilities=None if request.tensors is None else row,
            plan="fast" if fast else "full",
            asked=[name for name in order if name in known] if fast else (),
            reason=request.reason if fast else None,
        )
        request.observer.classified(answer, combined.entropy)
        return answer

    def check_health(self) -> None:
        if self._preprocess is not None:
            self._preprocess.calls.check_health()

    async def _ask_members(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        if not len(images):
            return []
        if request.tensors is not None and (name := request.tensors.member) is not None:
            if name not in self.member_names:
                # The request came from an older Gateway, with another set's members.
                raise OtherSetError(f"no member {name!r} here; {UPDATING}")
            return await self.members.ask(images, request, (name,), 1)
        return await (self._fast_of(request) or self.members).ask(images, request)

    def _fast_of(self, request: ClassifyRequest) -> FastMembers | None:
        """Return the fast plan if the request is answered by it; a set may have none."""
        return self.fast if request.plan == "fast" else None

    async def _combine(self, result: MemberResults, request: ClassifyRequest) -> list[Combined]:
        rows = {name: answer.probabilities for name, answer in result.answers.items()}
        tensors = request.tensors
        if tensors is not None and tensors.member is not None and not self.averages:
            return self._of_one(tensors.member, rows, request)
        asked: dict[str, Any] = {} if result.step is None else {"step": result.step}
        if request.has_set:
            asked["has_set"] = True
        combined = await self._combiner.combine(
            rows, request.top_k, request.left_s, request.threshold, **asked
        )
        if combined[0].model_set_fingerprint != self._combined_fingerprint:
            raise OtherSetError(UPDATING)
        return combined

    def _of_one(
        self, name: str, rows: Mapping[str, Probabilities], request: ClassifyRequest
    ) -> list[Combined]:
        """Return the answers of a member that was asked alone, without the operator's combine."""
        facts = (self._rule.asked(request.threshold), request.top_k, self._fingerprint)
        trust = self._trust.of(rows)
        return [
            Combined.of(row, {name: row}, *facts, trust, has_set=request.has_set)
            for row in rows[name]
        ]

    def _answers_of_good(self, request: ClassifyRequest, computed: Computed) -> list[Classified]:
        """Return the good images' answers, in the order of the request's files."""
        answers: dict[int, Classified] = {}  # by position among the good images
        observer, decode_ms = request.observer, computed.decoded.decode_ms
        for result, images in zip(computed.results, computed.combined, strict=True):
            rows = None if request.tensors is None else self._probabilities(result, images)
            for row, (position, image) in enumerate(zip(result.images, images, strict=True)):
                own = result.answers.get(request.embedding or "")
                features = None if own is None else own.features
                timings = observer.timings_of_image(
                    row, decode_ms[position], result.call_times, result.answers
                )
                answers[position] = classified(
                    image,
                    self._name,
                    self._fingerprint,
                    result.skipped,
                    result.missing,
                    request.request_id,
                    timings,
                    probabilities=None if rows is None else rows[row],
                    embedding=None if features is None else features[row],
                    plan="fast" if result.asked else "full",
                    asked=result.asked,
                    reason=request.reason if result.asked else None,
                )
                observer.classified(answers[position], image.entropy)
        return [answers[position] for position in range(len(answers))]

    def _probabilities(
        self, result: MemberResults, images: Sequence[Combined]
    ) -> Sequence[Probabilities]:
        """Return each image's probabilities, (C,): the Combiner's own, or the members' average."""
        if own := [image.row for image in images if image.row is not None]:
            return own
        members = {name: answer.probabilities for name, answer in result.answers.items()}
        temperature = self._trust.of(members, result.step).temperature
        return list(average(members, self._weights, temperature))  # of (K, C) float32


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
        return await _CachedRun(self, request).answers()


class _CachedRun:
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
