"""Copies a set to an object store, from which :mod:`models.stores` fetches it."""

import shutil
from pathlib import Path

from models.manifest import MANIFEST_NAME, read_manifest
from models.record import sha256_of
from models.store_files import CHUNK_BYTES, EXTRAS, OBJECT_STORES, StoreError, said, smart_open_file
from models.stores import store_url
from models.versions import VERSIONS_NAME


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
