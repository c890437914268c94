"""Judges a model set by its accuracy records: verified, unmeasured, or dropped.

To refuse a set it is enough that its INT8 networks are those that lost too much, whatever else of
the set has changed. To verify it, everything must be as it was measured: the networks and the
conditions. DECISIONS.md, "Accuracy records".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.accuracy import ENSEMBLE, AccuracyRecord, Drop, MultiLabelDrop, ValidationDrop
from models.manifest import Manifest
from models.record import Precision

Status = Literal["verified", "unmeasured", "dropped"]


@dataclass(frozen=True)
class Verdict:
    """``verified``: serve; ``unmeasured``: serve with a warning; ``dropped``: refuse."""

    status: Status
    message: str


def records_of_networks(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records that measured the networks the manifest names now, newest last.

    Conditions may have changed since: sizes and CPU times still hold, accuracy may not.
    """
    now = {
        member.name: {p: network.fingerprint for p, network in member.networks.items()}
        for member in manifest.members
    }

    def is_of_these(record: AccuracyRecord) -> bool:
        return set(record.fingerprints) == set(now) and all(
            now[name].get(precision) == fingerprint
            for name, measured in record.fingerprints.items()
            for precision, fingerprint in measured.items()
        )

    return sorted((r for r in manifest.accuracy if is_of_these(r)), key=lambda r: r.measured)


def current_records(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records whose networks and conditions are those of now, newest last."""
    conditions = manifest.conditions
    return [r for r in records_of_networks(manifest) if r.conditions == conditions]


def judge(manifest: Manifest, precision: Precision = "INT8") -> Verdict:
    """Judge by every record: one dataset on which INT8 lost too much is enough to refuse."""
    records = [r for r in current_records(manifest) if precision in r.scores]
    if precision == "INT8" and (problem := _drop_problem(manifest, records)):
        return Verdict("dropped", problem)
    how = f"tandem evaluate {manifest.name} --images DIR measures it"
    if not records:
        stale = _why_stale(manifest, precision)
        return Verdict(
            "unmeasured", f"{manifest.name} has no accuracy record of {precision}{stale}; {how}"
        )
    newest = records[-1]
    if precision == "FP16":
        return _judge_float(manifest, newest)
    if all(member.imported_int8 for member in manifest.members):
        return Verdict(
            "verified",
            f"{manifest.name}: measured on {newest.dataset}, {newest.measured}; its networks came "
            "quantised, without float ones to be compared with",
        )
    if not any(record.drops for record in records):
        return Verdict(
            "unmeasured",
            f"{manifest.name}: INT8 was never compared with the float networks; {how}",
        )
    return Verdict("verified", f"{manifest.name}: measured on {newest.dataset}, {newest.measured}")


def _judge_float(manifest: Manifest, newest: AccuracyRecord) -> Verdict:
    if manifest.float_type != "f32":
        return Verdict(
            "unmeasured",
            f"{manifest.name}: its float networks were measured in f32, but its manifest has them "
            f"run in {manifest.float_type}; remove float_type there, or compare what is served: "
            f"tandem evaluate {manifest.name} --images DIR --url URL",
        )
    return Verdict("verified", f"{manifest.name}: measured on {newest.dataset}")


def _why_stale(manifest: Manifest, precision: Precision) -> str:
    """Say why no record counts, if there are any."""
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


def _drop_problem(manifest: Manifest, current: Sequence[AccuracyRecord]) -> str | None:
    """Say where these INT8 networks lost too much, by an evaluation or as they were quantised."""
    for record in manifest.accuracy:
        for name, drop in record.drops.items():
            if drop.worst[1] > manifest.max_drop and _is_of_int8(manifest, record, name):
                return _too_much(manifest, name, drop, record)
    return _validation_problem(manifest, current)


def _is_of_int8(manifest: Manifest, record: AccuracyRecord, name: str) -> bool:
    """Whether ``name``, a member or the ensemble, has the INT8 networks that were measured."""
    now = {m.name: m.networks["INT8"].fingerprint for m in manifest.members if "INT8" in m.networks}
    measured = {n: by["INT8"] for n, by in record.fingerprints.items() if "INT8" in by}
    if name == ENSEMBLE:
        return measured == now
    return name in now and measured.get(name) == now[name]


def _validation_problem(manifest: Manifest, current: Sequence[AccuracyRecord]) -> str | None:
    """Say which member lost too much when it was quantised, if one did.

    An evaluation that compared the same networks on as many images or more is the better evidence
    and takes the place of what quantising measured.
    """
    for member in manifest.members:
        found, network = member.validation_drop, member.networks.get("INT8")
        if found is None or network is None or found.fingerprint != network.fingerprint:
            continue
        compared = max((r.num_images for r in current if member.name in r.drops), default=0)
        if found.drop.top1 > manifest.max_drop and found.num_images > compared:
            return (
                f"{_too_much(manifest, member.name, found.drop, found)}. So tandem quantize "
                f"measured it; tandem evaluate {manifest.name} on as many other images overrules it"
            )
    return None


def _too_much(
    manifest: Manifest,
    name: str,
    drop: Drop | MultiLabelDrop,
    measured: AccuracyRecord | ValidationDrop,
) -> str:
    figure, lost = drop.worst
    return (
        f"{manifest.name}: INT8 costs {name} {_points(lost)} of {figure} on {measured.dataset} "
        f"({measured.num_images} images), over the set's max_drop of {_points(manifest.max_drop)}; "
        f"quantise it again (tandem quantize {manifest.name}), serve the float networks "
        "(precision: FP16), or accept it with --allow-unverified"
    )


def _points(fraction: float) -> str:
    return f"{fraction * 100:.2f} points"


def with_record(manifest: Manifest, record: AccuracyRecord) -> Manifest:
    """Add a record; it replaces older ones of the same images, and stale ones go."""
    kept = [r for r in current_records(manifest) if r.images_sha256 != record.images_sha256]
    return manifest.model_copy(update={"accuracy": (*kept, record)})
