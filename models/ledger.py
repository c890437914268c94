"""Judges a model set by its accuracy record: verified, unmeasured, or dropped."""

from dataclasses import dataclass
from typing import Literal

from models.accuracy import AccuracyRecord
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
                return Verdict(
                    "dropped",
                    f"{manifest.name}: INT8 costs {name} {_points(drop.top1)} of top-1 on "
                    f"{record.dataset} ({record.num_images} images), over the set's max_drop of "
                    f"{_points(manifest.max_drop)}; quantise it again (tandem quantize "
                    f"{manifest.name}), serve the float networks (precision: FP16), or accept it "
                    "with --allow-unverified",
                )
    if not any(record.drops for record in records):
        return Verdict(
            "unmeasured",
            f"{manifest.name}: INT8 was never compared with the float networks; {how}",
        )
    newest = records[-1]
    return Verdict("verified", f"{manifest.name}: measured on {newest.dataset}, {newest.measured}")


def _points(fraction: float) -> str:
    return f"{fraction * 100:.2f} points"


def with_record(manifest: Manifest, record: AccuracyRecord) -> Manifest:
    """Add a record; it replaces older ones of the same images, and stale ones go."""
    kept = [r for r in current_records(manifest) if r.images_sha256 != record.images_sha256]
    return manifest.model_copy(update={"accuracy": (*kept, record)})
