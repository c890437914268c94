"""Brings the bundled set's float networks, which the wheel leaves out, from one of their own."""

from hashlib import sha256

from calibration.sets.download import DownloadError, ReportProgress
from calibration.sets.packaged.wheels import Wheel, WheelSource, fetch_wheel, read_from
from calibration.sets.staging import writing
from calibration.sets.transaction import change
from models.extras import DISTRIBUTION
from models.model_set import ModelSet
from models.record import FileRecord

# Built by .ci/release. Its version moves with the networks, not with the program.
WHEEL = Wheel(f"{DISTRIBUTION}-imagenette-float", "1", num_bytes=66_550_000)
FOLDER = "tandem_imagenette_float"  # in the wheel


def fetch_float_networks(
    model_set: ModelSet, source: WheelSource, report: ReportProgress = lambda _, __: None
) -> tuple[FileRecord, ...]:
    """Put what the set's folder lacks, or has damaged, into it; return what that was.

    The wheel's own hash is not pinned: each file must be the one that the set's manifest names.

    Raises:
        DownloadError: pip cannot get the wheel, or a file in it is another one.
        ModelSetError: the wheel lacks a file, the folder is not ours to write, the disk is full.

    """
    manifest = model_set.manifest
    lacking = tuple(record for record in manifest.files if model_set.problem_with(record))
    if not lacking:
        return ()
    with change(model_set.folder) as staging:  # first: it says whether the folder can be written
        wheel = fetch_wheel(WHEEL, source, report)
        for record in lacking:
            content = read_from(wheel, f"{FOLDER}/{record.path}")
            if (got := sha256(content).hexdigest()) != record.sha256:
                if source.folder is None:
                    wheel.unlink()  # else the next command would take it from the cache again
                raise DownloadError(
                    f"{record.path} of {wheel.name} is not the network of this version: its sha256 "
                    f"is {got[:12]}..., the manifest says {record.sha256[:12]}.... Nothing was "
                    "changed. Fetch it again; if it happens twice, the registry has another file"
                )
            with writing(staging.work):
                (staging.work / record.path).write_bytes(content)
        staging.move_in(manifest)
    return lacking
