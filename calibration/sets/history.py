"""Keeps a set's earlier versions when a command replaces it.

A version is a complete set in ``.versions`` of the set's folder (:mod:`models.versions`). Its files
are hard links if the disk supports them, so that shared files take room once.
"""

import os
import shlex
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from calibration.sets.durable import flush
from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME, Made, Manifest, read_manifest
from models.model_set import BUNDLED_DIR, PARTIAL_SUFFIX, ModelSet
from models.versions import MAX_EARLIER, VERSIONS_NAME, earlier_folders


def is_bundled(folder: Path) -> bool:
    """Whether the set comes with the program, in which case no versions of it are kept."""
    return folder.resolve().parent == BUNDLED_DIR.resolve()


def check_current(folder: Path) -> None:
    """Raise :class:`ModelSetError` for an earlier version's folder: a version never changes."""
    if folder.absolute().parent.name == VERSIONS_NAME:
        version = shlex.quote(f"{folder.absolute().parent.parent}@{folder.name}")
        raise ModelSetError(
            f"{folder} is an earlier version, which stays as it is; make it the current one first: "
            f"tandem models pin {version}"
        )


def new_version(folder: Path, manifest: Manifest, made_by: str) -> Manifest:
    """Keep the set in ``folder`` as a version if ``manifest`` differs; record the command."""
    old, new = _readable(folder), ModelSet(folder, manifest)
    if old is not None and old.fingerprints == new.fingerprints:
        return manifest
    if old is not None and not is_bundled(folder):
        _keep(old, folder, new)
    return manifest.model_copy(update={"made": Made(by=made_by, at=_now())})


def keep_replaced(folder: Path, building: Path) -> None:
    """Keep the set in ``folder``, and its versions, in ``building``, which will replace it."""
    old, new = _readable(folder), _readable(building)
    if new is None or is_bundled(folder):
        return
    for place in reversed(earlier_folders(folder)):
        if (earlier := _readable(place)) is not None:
            _keep(earlier, building, new)
    if old is not None:
        _keep(old, building, new)


def link_files(model_set: ModelSet, folder: Path) -> None:
    """Link a set's existing files into another folder, and its manifest last."""
    for record in model_set.manifest.files:
        if model_set.is_here(record):
            link(model_set.folder / record.path, folder / record.path)
    # Copied, not linked: an editor may write a manifest in place.
    shutil.copyfile(model_set.folder / MANIFEST_NAME, folder / MANIFEST_NAME)
    flush(folder / MANIFEST_NAME)
    flush(folder)


def link(source: Path, target: Path) -> None:
    """Link a file, or copy it if the disk has no hard links; an existing target stays."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)


def _keep(old: ModelSet, folder: Path, new: ModelSet) -> None:
    """Keep a set as an earlier version in ``folder``, unless the new set has the same version."""
    known = tuple(old.fingerprints.values())
    if set(known) <= set(new.fingerprints.values()):
        return
    versions = folder / VERSIONS_NAME
    place = versions / known[0]
    partial = place.with_name(f"{place.name}{PARTIAL_SUFFIX}")
    for left in versions.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)
    link_files(old, partial)
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)
    flush(versions)
    for oldest in earlier_folders(folder)[MAX_EARLIER:]:
        shutil.rmtree(oldest)


def _readable(folder: Path) -> ModelSet | None:
    """Return the set in a folder; None if there is none, or its manifest cannot be read."""
    with suppress(ModelSetError):
        return ModelSet(folder, read_manifest(folder))
    return None


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
