"""The graph's execution: Decoder, then every member in parallel (or the cascade), then Combiner.

The operator's own functions (:mod:`app.functions`) are between Decoder and members, and in the
Combiner.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from app.errors import UPDATING, OtherSetError
from app.functions.loading import fingerprint_with, load_function
from app.functions.stages import OwnPreprocess
from app.graph.cascade import Cascade, cascade_of
from app.graph.combination import combined_row
from app.graph.members import MemberResults, Members
from app.graph.probabilities import with_probabilities
from app.graph.request import ClassifyRequest, RequestAnswers
from app.graph.rolling_update import check_same_model_set
from app.graph.stages import CombinerStage, DecoderStage, MemberStage
from app.graph.task import check_task
from app.graph.timeline import Interval
from app.graph.views import viewed
from app.messages import Combined, Decoded
from app.metrics.responses import record_answers
from app.responses import Classified, classified
from app.settings import Settings
from models.ensemble import Probabilities
from models.model_set import ModelSet
from models.runtime import Pixels

# Takes what all members said of a file, by its place in the request: (M, C) float32. With a combine
# of the operator's own the ensemble's row comes after them: (M + 1, C).
Keep = Callable[[int, Probabilities], None]


class Ensemble:
    """Sends a request through the stages, each in this process or a deployment of its own."""

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet,
        decoder: DecoderStage,
        members: Mapping[str, MemberStage],
        combiner: CombinerStage,
    ) -> None:
        check_task(settings, model_set.manifest)
        self._decoder, self._combiner = decoder, combiner
        self._name, self.member_names = model_set.name, tuple(members)
        self._rule = model_set.answer_rule
        self._fingerprint = model_set.fingerprint(settings.precision)
        inputs = model_set.manifest.inputs
        own_combine = load_function(settings, "combine")  # which the Combiner calls
        self._averages = own_combine is None
        self._combined_fingerprint = fingerprint_with(self._fingerprint, own_combine)
        self._preprocess = OwnPreprocess.of(settings, model_set.manifest)
        if self._preprocess is not None:
            members = viewed(members, self._preprocess.num_views)
        self.members = Members(
            members, inputs, self._fingerprint, settings.answer_policy, settings.member_patience_s
        )
        self.cascade: Cascade | None = cascade_of(members, inputs, settings, self._fingerprint)
        self._alone = {
            name: Members({name: member}, inputs, self._fingerprint)
            for name, member in members.items()
        }
        self._weights = {member.name: member.weight for member in model_set.manifest.members}

    async def run(self, request: ClassifyRequest, keep: Keep | None = None) -> RequestAnswers:
        """Answer every file, in order; a bad file's answer is its fault.

        Args:
            request: the files, and how they are to be answered.
            keep: is given the probabilities of every file that all members answered, in the order
                of ``member_names``.

        Raises:
            OverloadedError, DeadlineError, NotReadyError: for the request as a whole.
            OtherSetError: a stage serves another model set, in the middle of a rolling update.

        """
        tensors = request.tensors
        with request.timeline.measure() as decoding:
            if tensors is not None and tensors.pixels is not None:
                decoded = Decoded(
                    tensors.pixels, {}, (0.0,) * len(tensors.pixels), self._fingerprint
                )
            else:
                decoded = await self._decoder.decode(request.files, request.left_s, request.lane)
        check_same_model_set(decoded.model_set_fingerprint, self._fingerprint)
        images = decoded.images
        if self._preprocess is not None and len(images):
            with request.timeline.measure("preprocess") as request.timeline.preprocessing:
                images = await self._preprocess.views(images)
        results = await self._ask_members(images, request)
        with request.timeline.measure("combine") as request.timeline.combining:
            combined = [await self._combine(result, request) for result in results]
        answers = self._answers(decoded, decoding, results, combined, request)
        if not request.is_probe:
            entropies = [image.entropy for images in combined for image in images]
            record_answers(answers, entropies)
        if keep is not None:
            self._give(keep, decoded, results, combined, len(request.files))
        if tensors is not None:
            answers = [*with_probabilities(answers, results, combined, self._weights)]
        in_order = iter(answers)
        return [decoded.faults.get(i) or next(in_order) for i in range(request.num_images)]

    def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call of the operator's function does not end."""
        if self._preprocess is not None:
            self._preprocess.calls.check_health()

    async def _ask_members(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        if not len(images):
            return []
        if request.tensors is not None and request.tensors.member is not None:
            return await self._member_alone(request.tensors.member).ask(images, request)
        members = self.cascade if self.cascade and request.may_skip else self.members
        return await members.ask(images, request)

    def _member_alone(self, name: str) -> Members:
        if name not in self._alone:  # of a request that an older Gateway forwarded
            raise OtherSetError(f"no member {name!r} here; {UPDATING}")
        return self._alone[name]

    async def _combine(self, result: MemberResults, request: ClassifyRequest) -> list[Combined]:
        rows = {name: answer.probabilities for name, answer in result.answers.items()}
        tensors = request.tensors
        if tensors is not None and tensors.member is not None and not self._averages:
            return self._of_one(tensors.member, rows, request)
        combined = await self._combiner.combine(
            rows, request.top_k, request.left_s, request.threshold
        )
        check_same_model_set(combined[0].model_set_fingerprint, self._combined_fingerprint)
        return combined

    def _of_one(
        self, name: str, rows: Mapping[str, Probabilities], request: ClassifyRequest
    ) -> list[Combined]:
        """Return what a member that was asked by itself says: the operator's combine is not."""
        facts = self._rule.asked(request.threshold), request.top_k, self._fingerprint
        return [combined_row(row, {name: row}, *facts) for row in rows[name]]

    def _give(
        self,
        keep: Keep,
        decoded: Decoded,
        results: Sequence[MemberResults],
        combined: Sequence[Sequence[Combined]],
        num_files: int,
    ) -> None:
        """Hand on the rows of images that no member was missing for, or skipped, as copies."""
        good = [index for index in range(num_files) if index not in decoded.faults]
        for result, images in zip(results, combined, strict=True):
            if result.skipped or result.missing:
                continue
            of_members = [result.answers[name].probabilities for name in self.member_names]
            for row, position in enumerate(result.images):
                kept = [rows[row] for rows in of_members]
                if (own := images[row].row) is not None:
                    kept.append(own)
                keep(good[position], np.stack(kept))

    def _answers(
        self,
        decoded: Decoded,
        decoding: Interval,
        results: Sequence[MemberResults],
        combined: Sequence[Sequence[Combined]],
        request: ClassifyRequest,
    ) -> list[Classified]:
        """Return the good images' answers, in the order of the request's files."""
        answers: dict[int, Classified] = {}  # by position among the good images
        for result, images in zip(results, combined, strict=True):
            for row, (position, image) in enumerate(zip(result.images, images, strict=True)):
                timings = request.timeline.of_image(
                    row, decoding, decoded.decode_ms[position], result.call_times, result.answers
                )
                answers[position] = classified(
                    image, self._name, result.skipped, result.missing, request.request_id, timings
                )
        return [answers[position] for position in range(len(answers))]
