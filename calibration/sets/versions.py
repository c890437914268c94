"""Keeps a set's earlier versions when a command replaces it, and pushes a set to an object store.

A version is a complete set in ``.versions`` of the set's folder (:mod:`models.stores`). Its files
are hard links if the disk supports them, so that shared files take room once.
"""

import errno
import os
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from models.errors import ModelSetError
from models.files import make_folder
from models.manifest import MANIFEST_NAME, Made, Manifest, read_manifest
from models.model_set import BUNDLED_DIR, PARTIAL_SUFFIX, ModelSet
from models.record import sha256_of
from models.stores import (
    CHUNK_BYTES,
    EXTRAS,
    MAX_EARLIER,
    OBJECT_STORES,
    VERSIONS_NAME,
    StoreError,
    earlier_folders,
    said,
    smart_open_file,
    store_url,
)


def is_bundled(folder: Path) -> bool:
    """Whether the set comes with the program, in which case no versions of it are kept."""
    return folder.resolve().parent == BUNDLED_DIR.resolve()


def new_version(folder: Path, manifest: Manifest, made_by: str) -> Manifest:
    """Keep the set in ``folder`` as a version if ``manifest`` differs; record the command."""
    old, new = _readable(folder), ModelSet(folder, manifest)
    if old is not None and old.fingerprints == new.fingerprints:
        return manifest
    if old is not None and not is_bundled(folder):
        _keep(old, folder, new)
    return manifest.model_copy(
        update={"made": Made(by=made_by, at=datetime.now(UTC).replace(microsecond=0))}
    )


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
    make_folder(target.parent)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)


def _keep(old: ModelSet, folder: Path, new: ModelSet) -> None:
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


def flush(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's entries."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that flushes no folders (some networks')
            raise
    finally:
        os.close(opened)


def push(folder: Path, versions: list[str], url: str) -> None:
    """Copy a set to a store; its manifest comes last, so that readers never see a part.

    Earlier pushed versions stay. ``versions`` are the set's fingerprints. Raises
    :class:`StoreError` if the store cannot be written, is a web server, or a file is missing here.
    """
    url = store_url(url, OBJECT_STORES)
    if url.partition("://")[0] not in EXTRAS:
        raise StoreError(
            f"cannot write to {url}: push to {OBJECT_STORES}, or copy the set's folder"
        )
    files = [record.path for record in read_manifest(folder).files]
    if absent := [path for path in files if not (folder / path).is_file()]:
        raise StoreError(
            f"cannot push {folder}: it lacks {', '.join(absent)}, and a store's set is whole; "
            "restore the files (tandem models fetch imagenette-float brings the bundled set's)"
        )
    kept = f"{url}/{VERSIONS_NAME}"
    digest = sha256_of(folder / MANIFEST_NAME)[:12]
    targets = [(path, f"{kept}/{digest}/{path}") for path in (*files, MANIFEST_NAME)]
    targets += [(MANIFEST_NAME, f"{kept}/{version}/{MANIFEST_NAME}") for version in versions]
    for path, target in (*targets, (MANIFEST_NAME, f"{url}/{MANIFEST_NAME}")):
        with (
            said(f"cannot write {target}"),
            (folder / path).open("rb") as source,
            smart_open_file(target, "wb") as opened,
        ):
            shutil.copyfileobj(source, opened, CHUNK_BYTES)
