"""The graph's execution: Decoder, then every member in parallel (or the cascade), then Combiner."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from app.errors import UPDATING, OtherSetError
from app.graph.cascade import Cascade, cascade_of
from app.graph.members import MemberResults, Members
from app.graph.probabilities import with_probabilities
from app.graph.request import ClassifyRequest, RequestAnswers
from app.graph.rolling_update import check_same_model_set
from app.graph.stages import CombinerStage, DecoderStage, MemberStage
from app.graph.timeline import Interval
from app.messages import Combined, Decoded
from app.metrics.responses import record_answers
from app.responses import Classified, classified
from app.settings import Settings
from models.ensemble import Probabilities
from models.model_set import ModelSet

# Takes what all members said of a file, by its place in the request: (M, C) float32.
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
        self._decoder, self._combiner = decoder, combiner
        self._name, self.member_names = model_set.name, tuple(members)
        self._fingerprint = model_set.fingerprint(settings.precision)
        inputs = model_set.manifest.inputs
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
        results = await self._ask_members(decoded, request)
        with request.timeline.measure("combine") as request.timeline.combining:
            combined = [await self._combine(result, request) for result in results]
        answers = self._answers(decoded, decoding, results, combined, request)
        if not request.is_probe:
            entropies = [image.entropy for images in combined for image in images]
            record_answers(answers, entropies)
        if keep is not None:
            self._give(keep, decoded, results, len(request.files))
        if tensors is not None:
            answers = [*with_probabilities(answers, results, self._weights)]
        in_order = iter(answers)
        return [decoded.faults.get(i) or next(in_order) for i in range(request.num_images)]

    async def _ask_members(self, decoded: Decoded, request: ClassifyRequest) -> list[MemberResults]:
        if not len(decoded.images):
            return []
        if request.tensors is not None and request.tensors.member is not None:
            return await self._member_alone(request.tensors.member).ask(decoded.images, request)
        members = self.cascade if self.cascade and request.may_skip else self.members
        return await members.ask(decoded.images, request)

    def _member_alone(self, name: str) -> Members:
        if name not in self._alone:  # of a request that an older Gateway forwarded
            raise OtherSetError(f"no member {name!r} here; {UPDATING}")
        return self._alone[name]

    async def _combine(self, result: MemberResults, request: ClassifyRequest) -> list[Combined]:
        rows = {name: answer.probabilities for name, answer in result.answers.items()}
        combined = await self._combiner.combine(rows, request.top_k, request.left_s)
        check_same_model_set(combined[0].model_set_fingerprint, self._fingerprint)
        return combined

    def _give(
        self, keep: Keep, decoded: Decoded, results: Sequence[MemberResults], num_files: int
    ) -> None:
        """Hand on the rows of images that no member was missing for, or skipped, as copies."""
        good = [index for index in range(num_files) if index not in decoded.faults]
        for result in results:
            if result.skipped or result.missing:
                continue
            of_members = [result.answers[name].probabilities for name in self.member_names]
            for row, position in enumerate(result.images):
                keep(good[position], np.stack([rows[row] for rows in of_members]))

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
