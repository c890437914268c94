"""Converts an evaluation to an accuracy record and writes it into the set's manifest."""

import platform
import tempfile
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from calibration.evaluation.evaluate import Evaluation, MultiLabelEvaluation
from calibration.sets.transaction import change, write_manifest, writing
from models.errors import ModelSetError
from models.image_colors import offline_profiles
from models.ledger import current_records, refused
from models.machine import cpu_model
from models.manifest import MANIFEST_NAME, Manifest, read_manifest
from models.model_set import ModelSet
from models.record import AccuracyRecord, FileRecord, Precision

PACKAGES = ("openvino", "onnxruntime", "torch", "nncf", "numpy", "opencv-python-headless")
RECORD_BYTES = 64 * 1024  # the most that a record of eight members adds to the manifest


class OutdatedRecordError(ModelSetError):
    """The set is not the one that was measured any more."""


def record_of(model_set: ModelSet, measured: Evaluation | MultiLabelEvaluation) -> AccuracyRecord:
    """Return the evaluation as a record, with the fingerprints of its networks."""
    scores = measured.scores
    precisions = tuple(scores)
    fingerprints: dict[str, dict[Precision, str]] = {}
    for m in model_set.manifest.members:
        own = [p for p in map(m.precision_of, precisions) if p in m.networks]
        fingerprints[m.name] = {p: m.networks[p].fingerprint for p in own}
    return AccuracyRecord(
        dataset=measured.dataset.name,
        images_sha256=measured.images_sha256,
        num_images=measured.num_images,
        measured=date.today(),
        cpu=cpu_model(),
        int8_kernels=measured.int8_kernels,
        float_type=measured.float_type,
        versions=_versions(),
        fingerprints=fingerprints,
        conditions=model_set.manifest.conditions,
        icc_profiles=offline_profiles(),
        scores=scores,
        drops=measured.lost,
        size_mb=sizes_mb(model_set, precisions),
        cpu_ms_per_image=measured.cpu_ms_per_image,
    )


def sizes_mb(
    model_set: ModelSet, precisions: tuple[Precision, ...]
) -> dict[str, dict[Precision, float]]:
    """Return the size of each network's files, in 10**6 bytes, by requested precision."""

    def size_of(file: FileRecord) -> int:
        return (model_set.folder / file.path).stat().st_size

    return {
        member.name: {
            p: round(sum(map(size_of, member.network(p).files)) / 1e6, 2)
            for p in precisions
            if member.precision_of(p) in member.networks
        }
        for member in model_set.manifest.members
    }


def check_can_keep(folder: Path, made_by: str | None = None) -> None:
    """Check before minutes of measuring that the record can be written.

    Raises:
        ModelSetError: another command changes the set, or its folder is not writable or full.
    """
    with change(folder, made_by) as staging:
        room = (folder / MANIFEST_NAME).stat().st_size + RECORD_BYTES
        staging.text("room", "\n" * room)


def keep(folder: Path, record: AccuracyRecord) -> None:
    """Write the record into the set's manifest, in one step.

    Raises:
        OutdatedRecordError: the set has changed since it was measured.
        ModelSetError: another command changes the set, or its folder is not writable or full.
    """
    with change(folder):
        manifest = with_record(read_manifest(folder), record)  # the present one
        if record not in current_records(manifest):
            raise OutdatedRecordError(
                f"the networks of {folder}, or their labels, weights or image rule, were changed "
                "while they were measured: nothing is recorded; evaluate them again"
            )
        with writing(folder):
            write_manifest(folder, manifest)


def kept_aside(record: AccuracyRecord) -> str:
    """Save a record that could not be added to the set; return where, or its text if that fails."""
    text = yaml.safe_dump([record.model_dump(mode="json", exclude_none=True)], sort_keys=False)
    how = "add it to the list accuracy of the set's manifest.yaml"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tandem-accuracy-", suffix=".yaml", delete=False, encoding="utf-8"
        ) as opened:
            opened.write(text)
    except OSError:  # perhaps the full disk is this one
        return f"This is the record; {how}:\n{text}"
    return f"The record is in {opened.name}: {how}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def with_record(manifest: Manifest, record: AccuracyRecord) -> Manifest:
    """Add a record; remove stale ones and those of the same images and conditions.

    A record that may refuse the present INT8 networks stays, whatever the conditions and
    ``max_drop``, until the same images are evaluated again under its conditions.
    """
    current, strictest = current_records(manifest), manifest.model_copy(update={"max_drop": 0.0})

    def stays(old: AccuracyRecord) -> bool:
        is_same = _measured(old) == _measured(record)
        if names := {judgement.name for judgement in refused(strictest, old)}:
            return not (is_same and names <= set(record.drops))
        return old in current and not is_same

    kept = tuple(old for old in manifest.accuracy if stays(old))
    return manifest.model_copy(update={"accuracy": (*kept, record)})


def _measured(record: AccuracyRecord) -> tuple[object, ...]:
    return record.images_sha256, record.conditions, record.icc_profiles
