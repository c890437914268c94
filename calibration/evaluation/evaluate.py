"""Evaluates a set on a labelled dataset: each member and the ensemble, float and INT8."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from calibration.datasets import (
    Dataset,
    ImageFile,
    LabelledImage,
    file_hashes,
    images_digest,
    truth_of,
)
from calibration.evaluation.fitting import part_of
from calibration.evaluation.inference import AnsweredBatch, Networks, Observer, Track
from calibration.statistics import Indices, ModeTally, Paired, Rightness, Tally
from models.accuracy import Drop, MultiLabelDrop, MultiLabelScore, Score
from models.ensemble import Flags, Probabilities, average
from models.errors import ModelSetError
from models.manifest import ENSEMBLE, Manifest
from models.model_set import ModelSet, read_lines
from models.plan import Trust, by_plan
from models.record import Precision

FAST = "fast, answered by "  # a step of the plan, by the members that it has asked


class Modes:
    """Counts the answers of each mode in which a set may answer, on the images for judging.

    They are all members, the fast plan and each of its steps, and some members alone, where the
    others are missing or left out.
    """

    def __init__(self, manifest: Manifest, precision: Precision) -> None:
        self._weights, self._trust = manifest.weights, manifest.trust_table
        self._plan = manifest.usable_plan(precision)
        self._subsets = [subset.members for subset in manifest.trust]
        self.tallies: dict[str, ModeTally] = {}

    def add(
        self, images: Sequence[LabelledImage], rows: Mapping[str, Probabilities], truth: Indices
    ) -> None:
        """Add a batch; ``rows`` are (N, C) of each member."""
        judges = np.array([part_of(image.path) == "judge" for image in images], np.bool_)
        truth = truth[judges]
        members = {name: rows[name][judges] for name in self._weights}
        for mode, trust, answers, own in self.answers(members):
            tally = self.tallies.setdefault(mode, ModeTally(trust.sure_from, trust.set_from))
            tally.add(answers, truth[own])

    def answers(
        self, members: Mapping[str, Probabilities]
    ) -> Iterator[tuple[str, Trust, Probabilities, Flags]]:
        """Yield each mode, its trust, its rows (K, C), and which of N images it answers.

        ``members`` has rows (N, C) of each member.
        """
        every = np.ones(len(next(iter(members.values()))), np.bool_)

        def averaged(names: Sequence[str]) -> tuple[Trust, Probabilities, Flags]:
            trust = self._trust.of(dict.fromkeys(names))
            some = {name: members[name] for name in names}
            return trust, average(some, self._weights, trust.temperature), every

        yield "full", *averaged(list(self._weights))
        if self._plan is not None and every.any():
            answers, at = by_plan(self._plan, members, self._weights)
            asked: tuple[str, ...] = ()
            for number, step in enumerate(self._plan.steps):
                asked += step.ask
                own, trust = at == number, self._trust.of(dict.fromkeys(asked), number)
                yield f"{FAST}{' + '.join(asked)}", trust, answers[own], own
        for names in self._subsets:
            yield f"{' + '.join(names)} alone", *averaged(names)


@dataclass
class Evaluation:
    """The counts of an evaluation, by precision, then by member name or ``ensemble``."""

    dataset: Dataset
    images_sha256: str
    tallies: dict[Precision, dict[str, Tally]] = field(default_factory=dict)
    drops: dict[str, Paired] = field(default_factory=dict)  # float against INT8
    over_members: dict[Precision, dict[str, Paired]] = field(default_factory=dict)
    num_agreed: dict[Precision, int] = field(default_factory=dict)  # images with equal top-1 of all
    # How far answers can be relied on, by the set's bounds, on images that chose none of them.
    modes: "dict[Precision, Modes]" = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    float_type: dict[Precision, str] = field(default_factory=dict)
    int8_kernels: str = ""
    cpu_ms_per_image: dict[str, dict[Precision, float]] = field(default_factory=dict)

    @property
    def scores(self) -> dict[Precision, dict[str, Score | MultiLabelScore]]:
        """Return the figures for the record."""
        return {
            precision: {name: tally.score for name, tally in tallies.items()}
            for precision, tallies in self.tallies.items()
        }

    @property
    def lost(self) -> dict[str, Drop | MultiLabelDrop]:
        """Return the losses for the record."""
        return {name: pair.drop for name, pair in sorted(self.drops.items())}

    @property
    def num_images(self) -> int:
        """The number of images that were read and answered."""
        return next((t.num_images for by in self.tallies.values() for t in by.values()), 0)

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Add a batch."""
        truth = truth_of(batch.images)
        self.unreadable += [f"{image.path}: {why}" for image, why in batch.unreadable]
        right: dict[Precision, dict[str, Rightness]] = {}
        for precision, rows in batch.probabilities.items():
            tallies = self.tallies.setdefault(precision, {})
            for name, probabilities in rows.items():
                tally = tallies.setdefault(name, Tally(probabilities.shape[1]))
                right.setdefault(precision, {})[name] = tally.add(probabilities, truth)
            members = [name for name in rows if name != ENSEMBLE]
            if ENSEMBLE in rows:
                pairs, of_all = self.over_members.setdefault(precision, {}), right[precision]
                for name in members:
                    pairs.setdefault(name, Paired()).add(of_all[ENSEMBLE], of_all[name])
                if (modes := self.modes.get(precision)) is not None:
                    modes.add(batch.images, rows, truth)
            firsts = np.stack([rows[name].argmax(1) for name in members])
            agreed = int((firsts == firsts[0]).all(axis=0).sum())
            self.num_agreed[precision] = self.num_agreed.get(precision, 0) + agreed
        for name in right.get("FP16", {}).keys() & right.get("INT8", {}).keys():
            drop = self.drops.setdefault(name, Paired())
            drop.add(right["FP16"][name], right["INT8"][name])


def evaluate_set(
    model_set: ModelSet,
    dataset: Dataset,
    precisions: Sequence[Precision],
    *,
    track: Track[LabelledImage] = lambda batches, _: batches,
    observe: Observer[LabelledImage] | None = None,
) -> Evaluation:
    """Run every image through every network; unreadable images are listed, without an error.

    ``track`` wraps the batches, for a progress bar. ``observe`` is called with each batch, in the
    thread that ran it. Raises :class:`ModelSetError` if an image was used for calibration, or none
    can be read.
    """
    result = Evaluation(dataset, check_not_calibrated(model_set, dataset.images))
    if model_set.manifest.sure is not None:
        result.modes = {p: Modes(model_set.manifest, p) for p in precisions}
    networks = Networks(model_set, precisions)
    result.float_type = networks.float_types()
    result.int8_kernels = networks.int8_kernels()
    result.cpu_ms_per_image = networks.cpu_ms_per_image()
    for answered in networks.answers(dataset.images, track, observe):
        result.add(answered)
    if not result.num_images:
        raise ModelSetError(
            f"none of the {len(dataset.images)} images of {dataset.name} can be read: "
            f"{result.unreadable[0]}"
        )
    return result


def check_not_calibrated(model_set: ModelSet, images: Sequence[ImageFile]) -> str:
    """Raise if an image was used for calibration; return a hash over all images' hashes."""
    record = model_set.manifest.calibration
    used = set(read_lines(model_set.verified(record))) if record else set()
    hashes = file_hashes(images)  # what is unreadable is listed later
    if seen := [path for path, value in hashes.items() if value in used]:
        raise ModelSetError(
            f"{len(seen)} of {len(images)} images were used to calibrate "
            f"{model_set.name} (INT8 was fitted to them, or chose its float layers by them), as "
            f"{seen[0]}: accuracy on them proves nothing. Give other images, or quantise again "
            "without these"
        )
    return images_digest(hashes.values())
