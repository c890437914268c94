"""Model sets whose INT8 answers otherwise than recorded, as on a CPU that computes it wrongly."""

import json
from pathlib import Path

from calibration.sets.transaction import write_manifest
from models.golden import GOLDEN_NAME
from models.manifest import read_manifest
from models.record import FileRecord
from tests.support.tiny_networks import record_golden, save_model, tiny_model, write_tiny_set

GAINS = {"sure": 8.0, "unsure": 6.0}


def both_precisions(folder: Path) -> Path:
    """Write a tiny set with INT8 and FP16 networks, and the golden answers of both."""
    write_tiny_set(folder, gains=GAINS)
    manifest = read_manifest(folder)
    members = []
    for member in manifest.members:
        network = save_model(tiny_model(gain=GAINS[member.name]), folder, f"{member.name}-fp16")
        members.append(member.model_copy(update={"networks": {**member.networks, "FP16": network}}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members)}))
    record_golden(folder)
    return folder


def spoil_int8(folder: Path, member: str) -> None:
    """Record other classes for the INT8 network of a member, hashes all right."""
    manifest = read_manifest(folder)
    content = json.loads((folder / GOLDEN_NAME).read_text("utf-8"))
    for row in content["answers"][member]["INT8"]["rows"]:
        for answer in row:
            answer[0] = (answer[0] + 1) % manifest.num_classes
    (folder / GOLDEN_NAME).write_text(json.dumps(content), "utf-8")
    golden = FileRecord.of(folder, GOLDEN_NAME)
    write_manifest(folder, manifest.model_copy(update={"golden": golden}))
