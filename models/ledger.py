"""Judges a model set by its accuracy records: verified, unmeasured, unknown, or dropped.

A record refuses a set if it measured the same INT8 networks, whatever else of the set has changed
since. A record verifies a set only if its networks and conditions are unchanged.
:mod:`models.drop_rule` decides whether a loss is significant. See decision 0010.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from models.accuracy import ENSEMBLE, AccuracyRecord, ValidationDrop
from models.drop_rule import LEAST_IMAGES, Judgement, judged, outcome_of
from models.manifest import Manifest
from models.record import Precision

Status = Literal["verified", "unmeasured", "unknown", "dropped"]


@dataclass(frozen=True)
class Verdict:
    """``verified``: serve; ``unmeasured``, ``unknown``: serve with a warning; ``dropped``: refuse.

    ``unknown``: measured with too few images to decide.
    """

    status: Status
    message: str


def records_of_networks(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records of the manifest's present networks, newest last.

    Conditions may have changed since. Then sizes and CPU times still hold, but accuracy may not.
    """
    now = {
        member.name: {p: network.fingerprint for p, network in member.networks.items()}
        for member in manifest.members
    }
    kept = (
        record
        for record in manifest.accuracy
        if record.fingerprints.keys() == now.keys()
        and all(by.items() <= now[name].items() for name, by in record.fingerprints.items())
    )
    return sorted(kept, key=lambda record: record.measured)


def current_records(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records of the present networks and conditions, newest last."""
    conditions = manifest.conditions
    return [r for r in records_of_networks(manifest) if r.conditions == conditions]


def ensemble_figures(manifest: Manifest, name: str) -> dict[Precision, float]:
    """Return the ensemble's figure ``name`` by precision, from the newest current record."""
    records = current_records(manifest)
    newest = records[-1].scores if records else {}
    figures = {p: scores[ENSEMBLE].figure for p, scores in newest.items() if ENSEMBLE in scores}
    return {p: value for p, (figure, value) in figures.items() if figure == name}


def judge(
    manifest: Manifest, precision: Precision = "INT8", argument: str | None = None
) -> Verdict:
    """Judge a set by all of its records.

    After a refusal, only another record with as many images can allow the set. ``argument`` is the
    set's name for commands in messages; None: the manifest's.
    """
    manifest = manifest.model_copy(update={"name": argument or manifest.name})
    runs = {member.precision_of(precision) for member in manifest.members}
    if len(runs) == 1:  # of float ONNX members alone there is no INT8
        (precision,) = runs
    if precision == "INT8" and (problem := _refusal(manifest)):
        return Verdict("dropped", problem)
    records = [r for r in current_records(manifest) if precision in r.scores]
    how = f"tandem evaluate {manifest.name} --images DIR measures it"
    if not records:
        stale = _why_stale(manifest, precision)
        return Verdict(
            "unmeasured", f"{manifest.name} has no accuracy record of {precision}{stale}; {how}"
        )
    if precision == "FP16":
        return _judge_float(manifest, records)
    if all(member.imported_int8 for member in manifest.members):
        came = "its networks came quantised, without float ones to be compared with"
        return _judge_alone(manifest, records, f"; {came}")
    compared = [record for record in records if record.drops]
    if not compared:
        return Verdict(
            "unmeasured", f"{manifest.name}: INT8 was never compared with the float networks; {how}"
        )
    return _judge_compared(manifest, compared)


def _judge_compared(manifest: Manifest, records: Sequence[AccuracyRecord]) -> Verdict:
    """Judge INT8 that no record refuses: verified by a record, or unknown."""
    for record in reversed(records):
        if outcome_of(_judgements(manifest, record)) == "verified":
            return _verified(manifest, record)
    unknown = {}  # by number of images; of equal ones the newest record
    for record in records:
        if open_ := [j for j in _judgements(manifest, record) if j.outcome == "unknown"]:
            unknown[record.num_images] = record, open_
    most, open_ = unknown[max(unknown)]  # the newest record is neither refused nor verified
    worst = max(open_, key=lambda j: j.num_more or float("inf"))
    more = f"About {worst.num_more:,}" if worst.num_more else "No number of"
    lost, high, limit = (_points(v) for v in (worst.loss.lost, worst.loss.high, worst.bound))
    return Verdict(
        "unknown",
        f"{manifest.name}: not known whether INT8 costs {worst.name} more than max_drop, "
        f"{_points(manifest.max_drop)} of {worst.loss.figure}: it lost {lost}, at most {high}, on "
        f"{most.num_images} images of {most.dataset}; {limit} at most would verify it. "
        f"{more} images more would tell: tandem evaluate {manifest.name} --images DIR",
    )


def _judge_float(manifest: Manifest, records: Sequence[AccuracyRecord]) -> Verdict:
    if manifest.float_type != "f32":
        return Verdict(
            "unmeasured",
            f"{manifest.name}: its float networks were measured in f32, but its manifest has them "
            f"run in {manifest.float_type}; remove float_type there, or compare the served "
            f"networks: tandem evaluate {manifest.name} --images DIR --url URL",
        )
    return _judge_alone(manifest, records)


def _judge_alone(manifest: Manifest, records: Sequence[AccuracyRecord], note: str = "") -> Verdict:
    """Judge networks without others to compare with, by the number of images."""
    most = max(records, key=lambda record: record.num_images)
    if most.num_images >= LEAST_IMAGES:
        return _verified(manifest, most, note)
    return Verdict(
        "unknown",
        f"{manifest.name}: measured on {most.num_images} images of {most.dataset}, which is too "
        f"few to tell; {LEAST_IMAGES - most.num_images} more would: tandem evaluate "
        f"{manifest.name} --images DIR",
    )


def _verified(manifest: Manifest, record: AccuracyRecord, note: str = "") -> Verdict:
    measured = f"measured on {record.dataset}, {record.num_images} images, {record.measured}"
    return Verdict("verified", f"{manifest.name}: {measured}{note}")


def _why_stale(manifest: Manifest, precision: Precision) -> str:
    """Return why no record counts, if there are records."""
    if not manifest.accuracy:
        return ""
    stale = [r for r in records_of_networks(manifest) if precision in r.scores]
    if not stale:
        return " for the networks that are there now"
    if (before := stale[-1].conditions) is None:
        return (
            " that says which image rule, labels and weights it was measured with (older versions "
            "of Tandem did not note them)"
        )
    changed = ", ".join(before.changes(manifest.conditions))
    return f" as the set is now: {changed} changed since it was measured"


def _judgements(manifest: Manifest, record: AccuracyRecord) -> list[Judgement]:
    return judged(record.drops, record.num_images, manifest.max_drop)


def refused(manifest: Manifest, record: AccuracyRecord) -> list[Judgement]:
    """Return the judgements by which the record refuses the present INT8 networks."""
    return [
        judgement
        for judgement in _judgements(manifest, record)
        if judgement.outcome == "refused" and _is_of_int8(manifest, record, judgement.name)
    ]


def standing_refusals(manifest: Manifest) -> Iterator[tuple[AccuracyRecord, Judgement]]:
    """Yield the refusals of the present INT8 networks that no later record overrules."""
    for place, record in enumerate(manifest.accuracy):
        for judgement in refused(manifest, record):
            if not _is_overruled(manifest, judgement, record, manifest.accuracy[place + 1 :]):
                yield record, judgement


def _is_of_int8(manifest: Manifest, record: AccuracyRecord, name: str) -> bool:
    """Whether ``name``, a member or the ensemble, still has the measured INT8 networks."""
    now = {m.name: m.networks["INT8"].fingerprint for m in manifest.members if "INT8" in m.networks}
    measured = {n: by["INT8"] for n, by in record.fingerprints.items() if "INT8" in by}
    if name == ENSEMBLE:
        return measured == now
    return name in now and measured.get(name) == now[name]


def _refusal(manifest: Manifest) -> str | None:
    """Return where the present INT8 networks lost too much: in an evaluation, or when quantised."""
    for record, judgement in standing_refusals(manifest):
        return _too_much(manifest, judgement, record)
    return _validation_refusal(manifest)


def _validation_refusal(manifest: Manifest) -> str | None:
    """Return which member lost too much when it was quantised, if any."""
    kept = [(m, m.validation_drop) for m in manifest.members if m.validation_drop]
    for member, validation in kept:
        network = member.networks.get("INT8")
        if network is None or validation.fingerprint != network.fingerprint:
            continue
        (judgement,) = judged(
            {member.name: validation.drop}, validation.num_images, manifest.max_drop, len(kept)
        )
        if judgement.outcome == "refused" and not _is_overruled(
            manifest, judgement, validation, manifest.accuracy
        ):
            return f"{_too_much(manifest, judgement, validation)}. So tandem quantize measured it"
    return None


def _is_overruled(
    manifest: Manifest,
    judgement: Judgement,
    refusing: AccuracyRecord | ValidationDrop,
    later: Sequence[AccuracyRecord],
) -> bool:
    """Whether a later evaluation, with at least as many images, overrules a refusal.

    With other images it must verify the figure: otherwise a few tries would give a lucky one. With
    the same images under other conditions it is enough that it does not refuse.
    """
    current = current_records(manifest)
    for record in later:
        if record not in current or record.num_images < refusing.num_images:
            continue
        outcomes = {
            j.outcome
            for j in _judgements(manifest, record)
            if (j.name, j.loss.figure) == (judgement.name, judgement.loss.figure)
        }
        is_same = record.images_sha256 == refusing.images_sha256
        if outcomes == {"verified"} or (is_same and outcomes == {"unknown"}):
            return True
    return False


def _too_much(
    manifest: Manifest, judgement: Judgement, measured: AccuracyRecord | ValidationDrop
) -> str:
    loss = judgement.loss
    return (
        f"{manifest.name}: INT8 costs {judgement.name} {_points(loss.lost)} of {loss.figure} on "
        f"{measured.dataset} ({measured.num_images} images), over the set's max_drop of "
        f"{_points(manifest.max_drop)} and more than chance; quantise it again (tandem quantize "
        f"{manifest.name}), serve the float networks (precision: FP16), accept it with "
        f"--allow-unverified, or find otherwise on {measured.num_images} images or more (tandem "
        f"evaluate {manifest.name})"
    )


def _points(fraction: float) -> str:
    return f"{fraction * 100:.2f} points"
