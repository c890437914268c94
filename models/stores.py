"""Model sets at URLs of object stores and web servers, fetched into a cache.

No store is listed: the manifest is read, then the files that it names, each checked by its hash.
The manifest's own hash names a set's folder in the cache, and in a store that it was pushed to:
``.versions/HASH``. Fingerprints are only looked up, since two manifests may share one.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from urllib.parse import quote

from platformdirs import user_cache_path

from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME, read_manifest
from models.record import sha256_of
from models.store_files import EXTRAS, OBJECT_STORES, WEB, StoreError, copy_file
from models.user_folders import needed_folder, user_folder
from models.versions import MAX_EARLIER, VERSION, VERSIONS_NAME, modified_ns

FORMS = f"{OBJECT_STORES}, hf://USER/REPOSITORY/FOLDER or https://HOST/FOLDER"
MAX_MANIFEST_BYTES, MAX_FILE_BYTES = 16 * 2**20, 8 * 2**30
# A store that may not be listed answers 403 for an absent file, some servers 200 with a page.
ABSENT = (200, 403, 404, 410)


def is_url(name: str) -> bool:
    """Whether a set's name is a store's URL."""
    scheme, separator, _ = name.partition("://")
    return bool(separator) and scheme in (*EXTRAS, *WEB)


def is_fetched(folder: Path) -> bool:
    """Whether a set's folder is a copy of a store's, made by :func:`fetch`."""
    cache = user_folder(user_cache_path, "sets")
    return cache is not None and folder.absolute().parent.parent == cache.absolute()


def versions_in(folder: Path) -> list[str]:
    """Return the fingerprints of the manifest in a folder; raise if it has no whole precision."""
    manifest = read_manifest(folder)
    return list(manifest.fingerprints.values()) or [manifest.fingerprint()]


def fetch(url: str, version: str | None) -> Path:
    """Return a folder with the set at ``url``, current or in a version, from cache or store.

    Only one process of a machine downloads at a time; the others wait and use its result.

    Raises:
        StoreError: the store cannot be read, a file is altered, the disk is full, or the store has
            another version.
        MissingExtraError: the package for this kind of store is not installed.

    """
    url = store_url(url)
    cache = needed_folder(user_cache_path, "sets", hashlib.sha256(url.encode()).hexdigest()[:16])
    try:
        if version and (kept := _kept(cache, version)):
            return kept
        with tempfile.TemporaryDirectory() as temporary:
            read = Path(temporary)
            place, digest = _find(url, version, read)
            if kept := _kept(cache, digest):
                return kept
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (kept := _kept(cache, digest)):
                    kept = cache / digest
                    _download(url, place, read, kept)
                    _prune(cache, kept)
                return kept
    except StoreError as error:
        names = dict.fromkeys(name for known in _names(cache).values() for name in known)
        copies = f"version {', '.join(names)}: URL@VERSION asks for it" if names else "no copy"
        raise StoreError(f"{error.message}; this machine has {copies}") from error
    except OSError as error:
        raise StoreError(
            f"cannot keep {url} in {cache}: {error.strerror or error}; make room, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error


def store_url(url: str, forms: str = FORMS) -> str:
    """Refuse URLs with credentials, without printing them, and URLs without a folder."""
    scheme, _, rest = url.rstrip("/").partition("://")
    host, *path = rest.split("/")
    if "@" in host:
        raise StoreError(
            f"the {scheme}:// URL of a set holds credentials, which logs would show: leave them "
            "out; give them in environment variables, or for a web server in ~/.netrc"
        )
    if "?" in rest or "#" in rest:
        raise StoreError(f"{re.split('[?#]', url)[0]}: the URL of a set has no ? and no #")
    if not host or (scheme == "hf" and not (path and path[0])):
        what = "names no folder" if "://" in url else "is no URL of a store"
        raise StoreError(f"{url} {what}: write {forms}")
    return f"{scheme}://{rest}"


def _names(cache: Path) -> dict[Path, list[str]]:
    """Return the cached sets with their fingerprints, the last fetched first."""
    names = {}
    folders = [path for path in cache.glob("*") if VERSION.fullmatch(path.name)]
    for folder in sorted(folders, key=modified_ns, reverse=True):
        with contextlib.suppress(ModelSetError):
            names[folder] = versions_in(folder)
    return names


def _kept(cache: Path, version: str) -> Path | None:
    """Return the cached folder of a version if all its files are unaltered, else None."""
    named = _names(cache).items()
    folder = next((f for f, known in named if version in (f.name, *known)), None)
    if folder is None or not _is_whole(folder):
        return None
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(folder / MANIFEST_NAME)  # marks it as used, so that others are removed first
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        hashes = {record.path: record.sha256 for record in read_manifest(folder).files}
        is_whole = all(sha256_of(folder / path) == sha256 for path, sha256 in hashes.items())
        return is_whole and sha256_of(folder / MANIFEST_NAME).startswith(folder.name)
    except ModelSetError:
        return False


def _find(url: str, version: str | None, read: Path) -> tuple[str, str]:
    """Fetch the manifest into ``read``; return the URL of its folder, and its hash."""
    for place in ([f"{url}/{VERSIONS_NAME}/{version}"] if version else []) + [url]:
        try:
            copied = copy_file(f"{place}/{MANIFEST_NAME}", read / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            known, digest = _known(place, read), copied[:12]
        except StoreError as error:
            if place == url or error.answered not in ABSENT:
                raise
            continue
        if version in (None, digest, *known):
            return place, digest
    raise StoreError(f"{url} is version {', '.join(known)}, not {version}")


def _known(place: str, read: Path) -> list[str]:
    try:
        return versions_in(read)
    except ModelSetError as error:
        problem = error.message.replace(str(read / MANIFEST_NAME), "its text")
        raised = StoreError(f"{place}/{MANIFEST_NAME} is no manifest: {problem}")
        raised.answered = 200
        raise raised from error


def _pushed(url: str, digest: str, read: Path) -> bool:
    """Whether the store's folder ``url`` has the manifest with this hash."""
    try:
        digest_there = copy_file(f"{url}/{MANIFEST_NAME}", read / "pushed", MAX_MANIFEST_BYTES)
    except StoreError as error:
        if error.answered not in ABSENT:
            raise
        return False
    return digest_there.startswith(digest)


def _download(url: str, place: str, read: Path, kept: Path) -> None:
    """Make the cached folder ``kept`` from the manifest in ``read`` and the store's files."""
    pushed = f"{url}/{VERSIONS_NAME}/{kept.name}"
    if _pushed(pushed, kept.name, read):
        place = pushed
    work = kept.with_name("partial")
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    try:
        for record in read_manifest(read).files:
            path = quote(record.path) if url.partition("://")[0] in WEB else record.path
            digest = copy_file(f"{place}/{path}", work / record.path, MAX_FILE_BYTES)
            if digest != record.sha256:
                raise StoreError(
                    f"{place}/{path} was altered: its sha256 is {digest[:12]}…, the manifest "
                    f"says {record.sha256[:12]}…; push the set again"
                )
        shutil.copyfile(read / MANIFEST_NAME, work / MANIFEST_NAME)
        shutil.rmtree(kept, ignore_errors=True)  # with an altered file
        work.rename(kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prune(cache: Path, kept: Path) -> None:
    """Remove the least recently used of the other cached sets."""
    others = [folder for folder in _names(cache) if folder != kept]
    others.sort(key=lambda folder: (folder / MANIFEST_NAME).stat().st_mtime_ns, reverse=True)
    for folder in others[MAX_EARLIER:]:
        shutil.rmtree(folder, ignore_errors=True)
