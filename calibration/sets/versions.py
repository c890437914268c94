"""Makes an earlier version of a set the current one again, and copies a set to an object store."""

import shutil
from pathlib import Path

from calibration.sets.transaction import create, is_bundled, link, link_files, writing
from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME, read_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet
from models.record import sha256_of
from models.stores import (
    CHUNK_BYTES,
    EXTRAS,
    OBJECT_STORES,
    VERSIONS_NAME,
    StoreError,
    said,
    smart_open_file,
    store_url,
)


def pin(model_set: ModelSet, version: str) -> ModelSet:
    """Replace the set by an earlier version, in one step; the replaced set is kept as a version.

    Raises:
        ModelSetError: the set has no such version, a file of it was altered, the set is bundled, or
            another command changes it.

    """
    folder = model_set.folder
    if is_bundled(folder):
        raise ModelSetError(
            f"{folder} comes with the program and is read-only: no versions of it are kept"
        )
    wanted = model_set.in_version(version)
    if wanted.folder == folder:
        return wanted
    with create(folder, is_replaced=True, made_by="tandem models pin") as staging:
        wanted = ModelSet(folder, read_manifest(folder)).in_version(
            version
        )  # nobody changes it now
        if problems := wanted.problems():
            raise ModelSetError(f"version {version} cannot be served: {problems[0]}")
        with writing(staging.folder):
            link_files(wanted, staging.folder)
            _link_users_own(folder, staging.folder)
    return ModelSet(folder, read_manifest(folder))


def _link_users_own(folder: Path, building: Path) -> None:
    """Link files that do not belong to the set, such as a user's notes, into the new folder."""
    ours = {MANIFEST_NAME, VERSIONS_NAME}
    ours |= {Path(record.path).parts[0] for record in read_manifest(folder).files}
    for path in folder.iterdir():
        target = building / path.name
        if path.name in ours or path.name.endswith(PARTIAL_SUFFIX) or target.exists():
            continue
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        else:
            link(path, target)


def push(folder: Path, versions: list[str], url: str) -> None:
    """Copy a set to a store; its manifest comes last, so that readers never see a part.

    Earlier pushed versions stay. ``versions`` are the set's fingerprints.

    Raises:
        StoreError: the store cannot be written, is a web server, or a file is missing here.

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
