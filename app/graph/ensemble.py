"""The graph: Decoder, then all members in parallel (or by a fast plan), then Combiner.

The operator's own functions (:mod:`app.stages.own_functions`) run between Decoder and members, and
in the Combiner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.answers import Classified, Combined, Decoded, Fault, Timings, classified
from app.errors import UPDATING, OtherSetError
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
from app.graph.redis_cache import Outcome
from app.graph.request import ClassifyRequest, RequestAnswers
from app.graph.served_models import check_plan
from app.settings import Settings
from app.stages.own_functions import OwnPreprocess, fingerprint_with
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
