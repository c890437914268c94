"""Judges a model set by its accuracy record: verified, unmeasured, or dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.accuracy import AccuracyRecord, Drop, ValidationDrop
from models.manifest import Manifest
from models.record import Precision

Status = Literal["verified", "unmeasured", "dropped"]


@dataclass(frozen=True)
class Verdict:
    """``verified``: serve; ``unmeasured``: serve with a warning; ``dropped``: refuse."""

    status: Status
    message: str


def current_records(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records that measured the networks the manifest names now, newest last."""
    now = {
        member.name: {p: network.fingerprint for p, network in member.networks.items()}
        for member in manifest.members
    }

    def is_current(record: AccuracyRecord) -> bool:
        return set(record.fingerprints) == set(now) and all(
            now[name].get(precision) == fingerprint
            for name, measured in record.fingerprints.items()
            for precision, fingerprint in measured.items()
        )

    return sorted((r for r in manifest.accuracy if is_current(r)), key=lambda r: r.measured)


def judge(manifest: Manifest, precision: Precision = "INT8") -> Verdict:
    """Judge by every current record: one dataset on which INT8 lost too much is enough."""
    records = [r for r in current_records(manifest) if precision in r.scores]
    if precision == "INT8" and (problem := _validation_problem(manifest, records)):
        return Verdict("dropped", problem)
    how = f"tandem evaluate {manifest.name} --images DIR measures it"
    if not records:
        stale = " for the networks that are there now" if manifest.accuracy else ""
        return Verdict(
            "unmeasured", f"{manifest.name} has no accuracy record of {precision}{stale}; {how}"
        )
    if precision != "INT8":
        return Verdict("verified", f"{manifest.name}: measured on {records[-1].dataset}")
    for record in records:
        for name, drop in record.drops.items():
            if drop.top1 > manifest.max_drop:
                return Verdict("dropped", _too_much(manifest, name, drop, record))
    if not any(record.drops for record in records):
        return Verdict(
            "unmeasured",
            f"{manifest.name}: INT8 was never compared with the float networks; {how}",
        )
    newest = records[-1]
    return Verdict("verified", f"{manifest.name}: measured on {newest.dataset}, {newest.measured}")


def _validation_problem(manifest: Manifest, records: Sequence[AccuracyRecord]) -> str | None:
    """Say which member lost too much when it was quantised, if one did.

    An evaluation that compared the same networks on as many images or more is the better evidence
    and takes the place of what quantising measured.
    """
    for member in manifest.members:
        found, network = member.validation_drop, member.networks.get("INT8")
        if found is None or network is None or found.fingerprint != network.fingerprint:
            continue
        compared = max((r.num_images for r in records if member.name in r.drops), default=0)
        if found.drop.top1 > manifest.max_drop and found.num_images > compared:
            return (
                f"{_too_much(manifest, member.name, found.drop, found)}. So tandem quantize "
                f"measured it; tandem evaluate {manifest.name} on as many other images overrules it"
            )
    return None


def _too_much(
    manifest: Manifest, name: str, drop: Drop, measured: AccuracyRecord | ValidationDrop
) -> str:
    return (
        f"{manifest.name}: INT8 costs {name} {_points(drop.top1)} of top-1 on {measured.dataset} "
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
