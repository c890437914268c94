"""Learns a set: photographs to features, heads, honest figures, and a folder as of any set."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from calibration.datasets import Dataset, LabelledImage, images_digest, short_name
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.fitting import Rows, with_temperatures
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.plans import search
from calibration.evaluation.report import record_of
from calibration.learning.features import (
    Backbone,
    FeatureCache,
    Features,
    Network,
    Track,
    backbones_of,
    compute,
)
from calibration.learning.heads import (
    Folds,
    Head,
    HeldOut,
    Places,
    alike_groups,
    fit,
    stratified_folds,
)
from calibration.learning.photographs import (
    NAME,
    NONE,
    Found,
    Photograph,
    add_corrections,
    as_text,
    classes_of,
    joined,
    photographs_of,
    read_photographs,
    without_single,
)
from calibration.sets.transaction import Staging, change, check_free, create, writing
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.files import write_whole
from models.machine import available_cpus
from models.manifest import ENSEMBLE, Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet, read_lines, some
from models.openvino_network import with_head
from models.record import Precision, Score

MADE_BY = "tandem learn"
CARD = """# {name}

{description} Made by `tandem learn`.

- **Accuracy** of the ensemble, top-1 with its 95 % interval, on {number} photographs
  ({judged_by}): {figures}. Each was answered by heads that had not seen it.
- **Sure** answers: {sure}.
- **Limit.** The networks learned their features from other photographs. Classes unlike those may
  need more photographs; the figures above are of photographs like yours, and of no others.
- **Photographs** are listed by sha256, class and name in `photographs.csv`; none is in the set.
- **Weights** of the networks: {license}. Their training data: {data}
"""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to learn, and from what."""

    name: str
    sources: Sequence[Path]  # folders of classes, or lists
    into: Path
    origin: ModelSet  # whose networks' features are learned on
    before: ModelSet | None = None  # the learned set that photographs are added to
    is_replaced: bool = False
    others: Path | None = None
    crops: Sequence[Photograph] = ()  # of the class none
    corrections: Sequence[Path] = ()  # teach_dir and sample_dir of a service
    validation: Path | None = None
    target: float = 0.95  # of right answers among sure ones


@dataclass(frozen=True)
class Foreign:
    """How many photographs of the class ``none`` would be sure of another class."""

    num: int
    with_none: int
    without: int | None  # by heads without that class; None: these have no bound


@dataclass
class Learned:
    """A learned set, and what was found while it was learned."""

    model_set: ModelSet
    photographs: list[Photograph]  # as held_out has them
    held_out: HeldOut
    rows: Probabilities  # (N, C), of the ensemble, held out
    evaluation: Evaluation
    judged_by: str
    num_photographs: int
    num_alike: int
    foreign: Foreign | None = None  # None: there is no class none
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Material:
    """Photographs with their features."""

    photographs: list[Photograph]
    labels: tuple[str, ...]
    features: Mapping[Network, Features]  # (N, 2, F)

    @property
    def truth(self) -> Places:
        places = {label: place for place, label in enumerate(self.labels)}
        return np.array([places[p.label] for p in self.photographs], np.int64)

    @property
    def groups(self) -> Places:
        origins = [p.origin or p.sha256 for p in self.photographs]
        first = {member: of[:, 0] for (member, _), of in self.features.items()}
        return alike_groups(list(first.values()), self.truth, origins)


def learn(
    request: Request,
    cache: FeatureCache,
    track: Track = lambda batches, _: batches,
    say: Say = lambda _: None,
) -> Learned:
    """Learn a set; it appears complete, in one step, or not at all.

    Raises:
        ModelSetError: there are fewer than two classes of two photographs, a network of ``origin``
            has no place to cut, or the set's place is taken.
    """
    folder = request.into / request.name
    if request.before is None:
        check_free(folder, is_replaced=request.is_replaced)
    backbones = backbones_of(request.origin)
    gathered, photographs = _gathered(request, cache)
    known = () if request.before is None else request.before.labels
    material = _material(request, backbones, photographs, known, cache, track, gathered)
    say("fitting")
    truth, groups = material.truth, material.groups
    folds = stratified_folds(truth, groups)
    heads, held_out_by_folds = _fitted(material.features, truth, folds)
    judged, judged_by, held_out = material, f"cross-validation, {folds.name}", held_out_by_folds
    if request.validation is not None:
        judged = _validation(request, backbones, material, cache, track, gathered)
        judged_by = short_name(request.validation)
        held_out = _judged_by_validation(judged, heads)
    say("writing the set")
    with _staging(request, folder) as staging:
        manifest, evaluation = _staged(
            staging,
            request,
            backbones,
            heads,
            material,
            judged,
            held_out,
            judged_by,
            cache,
            gathered,
        )
        staging.move_in(manifest)
        _write_card(staging.folder, manifest, judged_by)
    model_set = ModelSet(folder, read_manifest(folder))
    foreign = _foreign(model_set.manifest, material, held_out_by_folds, request.target)
    whole = held_out.tempered(model_set.manifest)[_precision(model_set.manifest)]
    return Learned(
        model_set,
        judged.photographs,
        held_out,
        whole[ENSEMBLE],
        evaluation,
        judged_by,
        len(material.photographs),
        len(truth) - len(np.unique(groups)),
        foreign,
        gathered.notes,
    )


def _gathered(request: Request, cache: FeatureCache) -> tuple[Found, list[Photograph]]:
    """Return the new photographs, and these with those of the set that is extended."""
    gathered = read_photographs(request.sources, request.others)
    if request.corrections:
        add_corrections(gathered, request.corrections)
    gathered.photographs += request.crops
    before = [] if request.before is None else photographs_of(request.before)
    return gathered, cache.placed(joined(before, gathered))


def _judged_by_validation(validated: _Material, heads: Mapping[Network, Head]) -> HeldOut:
    """Return the heads' answers to photographs that none of them was fitted on."""
    rows = {name: heads[name].rows(of[:, 0]) for name, of in validated.features.items()}
    folds = stratified_folds(validated.truth, validated.groups)
    return HeldOut(validated.truth, folds.of, _by_precision(rows))


def _fitted(
    features: Mapping[Network, Features], truth: Places, folds: Folds
) -> tuple[dict[Network, Head], HeldOut]:
    """Fit a head for each network, with a thread each: BLAS's own would wait for each other."""
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(available_cpus()) as pool:
        fitted = list(pool.map(lambda of: fit(of, truth, folds), features.values()))
    heads = {name: head for name, (head, _) in zip(features, fitted, strict=True)}
    rows = {name: held for name, (_, held) in zip(features, fitted, strict=True)}
    return heads, HeldOut(truth, folds.of, _by_precision(rows))


def _staging(request: Request, folder: Path) -> AbstractContextManager[Staging]:
    if request.before is not None:
        return change(folder, MADE_BY)
    return create(folder, is_replaced=request.is_replaced, made_by=MADE_BY)


def _material(
    request: Request,
    backbones: Mapping[Network, Backbone],
    photographs: Sequence[Photograph],
    known: Sequence[str],
    cache: FeatureCache,
    track: Track,
    gathered: Found,
) -> _Material:
    inputs = request.origin.manifest.inputs
    readable, unreadable = compute(dict(backbones), photographs, inputs, cache, track)
    if unreadable:
        gathered.notes.append(f"{len(unreadable)} photographs are left out: {some(unreadable)}")
    kept = without_single(readable, gathered.notes)
    sha256s = [photograph.sha256 for photograph in kept]
    features = {name: cache.features(backbone, sha256s) for name, backbone in backbones.items()}
    return _Material(kept, classes_of(kept, known), features)


def _validation(
    request: Request,
    backbones: Mapping[Network, Backbone],
    material: _Material,
    cache: FeatureCache,
    track: Track,
    gathered: Found,
) -> _Material:
    """Return the photographs of ``--validation`` that are of the classes, and not learned from."""
    assert request.validation is not None
    own = read_photographs([request.validation])
    gathered.notes += own.notes
    learned = {photograph.sha256 for photograph in material.photographs}
    copies = [p.name for p in own.photographs if p.sha256 in learned]
    strangers = {p.label for p in own.photographs} - {*material.labels}
    if copies:
        gathered.notes.append(
            f"{len(copies)} photographs of --validation are learned from, and do "
            f"not judge: {some(copies)}"
        )
    if strangers:
        gathered.notes.append(
            f"--validation has {len(strangers)} classes that are not learned: "
            f"{some(sorted(strangers))}"
        )
    left = [p for p in own.photographs if p.sha256 not in learned and p.label not in strangers]
    inputs = request.origin.manifest.inputs
    readable, unreadable = compute(dict(backbones), left, inputs, cache, track)
    if unreadable:
        gathered.notes.append(f"{len(unreadable)} of --validation are left out: {some(unreadable)}")
    if not readable:
        raise ModelSetError(
            f"--validation {request.validation} has no photograph of the learned classes that is "
            "not learned from; give others, or leave it out"
        )
    sha256s = [photograph.sha256 for photograph in readable]
    features = {name: cache.features(backbone, sha256s) for name, backbone in backbones.items()}
    return _Material(readable, material.labels, features)


def _foreign(
    manifest: Manifest, material: _Material, held_out: HeldOut, target: float
) -> Foreign | None:
    """Count sure answers to photographs of ``none``, by heads with that class and without it."""
    none = next((n for n, label in enumerate(material.labels) if label.casefold() == NONE), None)
    if none is None or len(material.labels) < 3:
        return None
    precision, is_none = _precision(manifest), held_out.truth == none
    rows = held_out.tempered(manifest)[precision][ENSEMBLE][is_none]
    bound = manifest.sure
    with_none = 0
    if bound is not None:
        is_sure = rows.max(axis=1) >= np.float32(bound.probability)
        with_none = int((is_sure & (rows.argmax(axis=1) != none)).sum())
    own = {n: of for n, of in material.features.items() if n[1] == precision}
    truth = held_out.truth[~is_none] - (held_out.truth[~is_none] > none)
    folds = stratified_folds(truth, material.groups[~is_none])
    heads, alone = _fitted({n: of[~is_none] for n, of in own.items()}, truth, folds)
    without = with_temperatures(manifest, alone.temperatures(manifest, precision))
    without = alone.trusted(without, precision, target)
    foreign = {n: heads[n].rows(of[is_none][:, 0]) for n, of in own.items()}
    likeliest = HeldOut(truth, folds.of, _by_precision(foreign)).tempered(without)[precision]
    sure = without.sure
    num = None
    if sure is not None:
        num = int((likeliest[ENSEMBLE].max(axis=1) >= np.float32(sure.probability)).sum())
    return Foreign(int(is_none.sum()), with_none, num)


def _write_card(folder: Path, manifest: Manifest, judged_by: str) -> None:
    """Write the set's card."""
    record = manifest.accuracy[-1]
    scores = {p: of[ENSEMBLE] for p, of in record.scores.items() if ENSEMBLE in of}
    figures = "; ".join(
        f"{p} {of.top1:.4f} ({of.top1_interval[0]:.3f} to {of.top1_interval[1]:.3f})"
        for p, of in scores.items()
        if isinstance(of, Score)
    )
    sure = manifest.sure
    with writing(folder):
        write_whole(
            folder / "README.md",
            CARD.format(
                name=manifest.name,
                description=manifest.description,
                judged_by=judged_by,
                number=record.num_images,
                figures=figures or "not measured",
                sure=f"from {sure.probability:.3f}" if sure else "no bound was found",
                license=manifest.license or "not stated",
                data=manifest.training_data or "not stated",
            ),
        )


def _by_precision(
    rows: Mapping[Network, Probabilities],
) -> dict[Precision, dict[str, Probabilities]]:
    by: dict[Precision, dict[str, Probabilities]] = {}
    for (member, precision), of in rows.items():
        by.setdefault(precision, {})[member] = of
    return by


def _precision(manifest: Manifest) -> Precision:
    return next(iter(manifest.fingerprints))


def _staged(
    staging: Staging,
    request: Request,
    backbones: Mapping[Network, Backbone],
    heads: Mapping[Network, Head],
    material: _Material,
    judged: _Material,
    held_out: HeldOut,
    judged_by: str,
    cache: FeatureCache,
    gathered: Found,
) -> tuple[Manifest, Evaluation]:
    """Write the networks, and return the manifest with all that was measured."""
    if request.before is not None and read_manifest(staging.folder) != request.before.manifest:
        raise ModelSetError(f"{staging.folder} was changed meanwhile: nothing is written; repeat")
    manifest = _with_networks(staging, request, backbones, heads, material)
    precision = _precision(manifest)
    manifest = with_temperatures(manifest, held_out.temperatures(manifest, precision))
    manifest = held_out.trusted(manifest, precision, request.target)
    facts = {name: cache.facts(backbone) for name, backbone in backbones.items()}
    dataset = f"{judged_by} of {request.name}" if judged is material else judged_by
    evaluation = _evaluation(dataset, manifest, judged, held_out)
    for (member, own), fact in facts.items():
        assert fact is not None
        evaluation.cpu_ms_per_image.setdefault(member, {})[own] = fact.cpu_ms
    for own in held_out.rows:
        of = [fact for (_, other), fact in facts.items() if other == own and fact is not None]
        evaluation.float_type[own] = ", ".join(sorted({fact.float_type for fact in of}))
        if own == "INT8":
            evaluation.int8_kernels = ", ".join(sorted({k for fact in of for k in fact.kernels}))
    manifest = _with_plan(manifest, precision, judged, held_out, evaluation, gathered)
    record = record_of(ModelSet(staging.work, manifest), evaluation)
    manifest = manifest.model_copy(
        update={"accuracy": (record,), "golden": staging.golden(manifest)}
    )
    return manifest, evaluation


def _with_networks(
    staging: Staging,
    request: Request,
    backbones: Mapping[Network, Backbone],
    heads: Mapping[Network, Head],
    material: _Material,
) -> Manifest:
    origin, members = request.origin.manifest, list[MemberRecord]()
    for member in origin.members:
        networks = {}
        for precision in (p for p in member.networks if (member.name, p) in backbones):
            head, where = heads[member.name, precision], f"{member.name}-{precision.lower()}"
            model = with_head(
                backbones[member.name, precision].whole, head.weights, head.bias, where
            )
            is_float = precision == "FP16"
            networks[precision] = staging.network(model, where, is_float=is_float)
        members.append(
            MemberRecord(
                name=member.name,
                source=member.source,
                networks=networks,
                image=member.image,
                fixed_batch=member.fixed_batch,
                imported_int8=member.imported_int8,
                quantization=member.quantization,
                left_float=member.left_float,
            )
        )
    used = origin.calibration
    hashes = set(read_lines(request.origin.verified(used))) if used else set()
    hashes |= {photograph.sha256 for photograph in material.photographs}
    number = len(material.labels)
    return Manifest(
        name=request.name,
        description=f"{number} classes, learned from {len(material.photographs)} photographs on "
        f"the features of {_origin_name(request)}.",
        image=origin.image,
        num_classes=number,
        labels=staging.text("labels.txt", "".join(f"{label}\n" for label in material.labels)),
        members=tuple(members),
        float_type=origin.float_type,
        max_drop=origin.max_drop,
        calibration=staging.text(
            "calibration-images.txt", "".join(f"{value}\n" for value in sorted(hashes))
        ),
        photographs=staging.text(NAME, as_text(material.photographs)),
        license=origin.license,
        training_data=origin.training_data,
    )


def _origin_name(request: Request) -> str:
    if request.before is not None and request.origin.folder == request.before.folder:
        return request.before.manifest.description.rpartition("features of ")[2].rstrip(".")
    return request.origin.name


def _evaluation(
    dataset: str, manifest: Manifest, judged: _Material, held_out: HeldOut
) -> Evaluation:
    images = tuple(
        LabelledImage(p.path or Path(p.name), int(place))
        for p, place in zip(judged.photographs, held_out.truth, strict=True)
    )
    sha256s = images_digest(photograph.sha256 for photograph in judged.photographs)
    evaluation = Evaluation(Dataset(dataset, images, ()), sha256s)
    evaluation.add(AnsweredBatch(list(images), [], held_out.tempered(manifest), []))
    return evaluation


def _with_plan(
    manifest: Manifest,
    precision: Precision,
    judged: _Material,
    held_out: HeldOut,
    evaluation: Evaluation,
    gathered: Found,
) -> Manifest:
    """Return the manifest with a fast plan, where there are enough photographs to choose one."""
    rows = Rows(manifest, precision)
    files = list(evaluation.dataset.images)
    rows.add(AnsweredBatch(files, [], held_out.tempered(manifest), []))
    costs = {name: of[precision] for name, of in evaluation.cpu_ms_per_image.items()}
    dataset = evaluation.dataset.name
    try:
        result = search(manifest, rows, precision, costs, dataset, evaluation.images_sha256)
    except ModelSetError as error:
        gathered.notes.append(f"no fast plan: {error.message.removeprefix('--plan: ')}")
        return manifest
    if result.outcome == "refused":
        gathered.notes.append("no fast plan: none keeps the accuracy on the photographs that judge")
        return manifest
    return manifest.model_copy(update={"fast_plan": result.record})
