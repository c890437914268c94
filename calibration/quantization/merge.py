"""Merges the results of quantising into the manifest, which may have been edited meanwhile.

Quantising takes minutes, and its lock stops other commands but not an editor. So the manifest is
read again at the end. Only the fields that quantising owns are replaced. If the inputs of INT8 have
changed, nothing is written.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME, Manifest, MemberRecord, read_manifest

OWNED = ("networks", "quantization", "left_float", "validation_drop")  # of a member


def merged(
    folder: Path,
    before: Manifest,
    made: Manifest,
    quantized: Collection[str],
    *,
    is_validated: bool,
) -> Manifest:
    """Return the present manifest with the ``quantized`` members' INT8 networks from ``made``.

    Args:
        folder: of the set.
        before: the manifest at the start of quantising.
        made: ``before`` with the results.
        quantized: names of members.
        is_validated: whether labels decided which images were right.

    Raises:
        ModelSetError: the manifest cannot be read, or inputs of INT8 have changed in it.

    """
    now = read_manifest(folder)
    then, today = (_basis(m, quantized, is_validated=is_validated) for m in (before, now))
    if changed := [what for what in then if then[what] != today[what]]:
        raise ModelSetError(
            f"{folder / MANIFEST_NAME} was edited while INT8 was made from it: "
            f"{', '.join(changed)} changed. Nothing was written; quantise again"
        )
    members = tuple(
        _with_owned(member, made.member(member.name)) if member.name in quantized else member
        for member in now.members
    )
    update = {
        "members": members,
        "calibration": made.calibration,
        "calibration_source": made.calibration_source,
        "golden": made.golden,
        "accuracy": made.accuracy,
        "sure": None,  # measured on the networks before
    }
    return now.model_copy(update=update)


def _basis(
    manifest: Manifest, quantized: Collection[str], *, is_validated: bool
) -> dict[str, object]:
    """Return the inputs of INT8, its drop and the golden answers, with names for messages."""
    basis: dict[str, object] = {
        "image": (manifest.image, [member.image for member in manifest.members]),
        "the members' networks": {member.name: member.networks for member in manifest.members},
        "quantization options": {
            member.name: member.quantization
            for member in manifest.members
            if member.name in quantized
        },
    }
    if is_validated:
        basis["labels"] = (manifest.num_classes, manifest.labels)
        basis["class ids"] = manifest.class_ids
    return basis


def _with_owned(now: MemberRecord, made: MemberRecord) -> MemberRecord:
    update: dict[str, Any] = {name: getattr(made, name) for name in OWNED}
    return now.model_copy(update=update)
