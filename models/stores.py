"""Model sets at URLs of object stores and web servers, fetched into a cache; versions of sets.

No store is listed: the manifest is read, then the files that it names, each checked by its hash.
The manifest's own hash names a set's folder in the cache, and in a store that it was pushed to:
``.versions/HASH``. Fingerprints are only looked up, since two manifests may share one.

A set's earlier versions are complete sets in a folder inside the set's. A fingerprint names a
version (:meth:`models.manifest.Manifest.fingerprint`), and NAME@VERSION a set in that version.
Commands that make another version keep the earlier (:mod:`calibration.sets.transaction`).
"""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from platformdirs import user_cache_path

from models.errors import ModelSetError, StoreError, TandemError
from models.files import locked, make_folder, needed_folder, user_folder
from models.machine import MissingExtraError, pip_install
from models.manifest import MANIFEST_NAME, read_manifest
from models.record import sha256_of

OBJECT_STORES = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
FORMS = f"{OBJECT_STORES}, hf://USER/REPOSITORY/FOLDER or https://HOST/FOLDER"
MAX_MANIFEST_BYTES, MAX_FILE_BYTES = 16 * 2**20, 8 * 2**30
# A store that may not be listed answers 403 for an absent file, some servers 200 with a page.
ABSENT = (200, 403, 404, 410)
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # read by smart_open; WEB schemes over HTTP
CLIENTS = {"s3": "boto3", "gs": "google-cloud-storage", "az": "azure-identity"}
WEB = ("https", "http", "hf")
HUB = "https://huggingface.co"
CHUNK_BYTES = 2**20
NUM_TRIES = 3
SILENCE_S = 30.0
RETRY_S = 10.0  # how long Google's client retries; its default is 120
SECRET = re.compile(r"(?<=//)[^/\s]+@|\?[^\s'\"]+")  # secrets of URLs, in messages of libraries
VERSIONS_NAME = ".versions"  # in the set's folder; contains a folder per earlier version
MAX_EARLIER = 5  # earlier versions per set; the oldest is removed
VERSION = re.compile(r"[0-9a-f]{12}")


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
            make_folder(cache)
            with locked(cache / "lock", os.O_CREAT | os.O_RDWR):
                if not (kept := _kept(cache, digest)):
                    kept = cache / digest
                    _download(url, place, read, kept)
                    used = [folder / MANIFEST_NAME for folder in _names(cache) if folder != kept]
                    used.sort(key=lambda manifest: manifest.stat().st_mtime_ns, reverse=True)
                    for manifest in used[MAX_EARLIER:]:
                        shutil.rmtree(manifest.parent, ignore_errors=True)
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
    if folder is None:
        return None
    try:
        records = read_manifest(folder).files
        is_whole = all(sha256_of(folder / record.path) == record.sha256 for record in records)
        if not (is_whole and sha256_of(folder / MANIFEST_NAME).startswith(folder.name)):
            return None
    except ModelSetError:
        return None
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(folder / MANIFEST_NAME)  # marks it as used, so that others are removed first
    return folder


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


def _download(url: str, place: str, read: Path, kept: Path) -> None:
    """Make the cached folder ``kept`` from the manifest in ``read`` and the store's files."""
    pushed = f"{url}/{VERSIONS_NAME}/{kept.name}"
    try:
        there = copy_file(f"{pushed}/{MANIFEST_NAME}", read / "pushed", MAX_MANIFEST_BYTES)
        place = pushed if there.startswith(kept.name) else place
    except StoreError as error:
        if error.answered not in ABSENT:
            raise
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


def copy_file(url: str, target: Path, most: int) -> str:
    """Copy a file of the store and return its SHA-256; retries after temporary errors.

    Raises:
        StoreError: the file does not exist, is unreadable, or has more than ``most`` bytes.
    """
    make_folder(target.parent)
    for attempt in range(NUM_TRIES):
        digest, num_bytes = hashlib.sha256(), 0
        try:
            with target.open("wb") as opened:
                for chunk in _chunks(url):
                    if (num_bytes := num_bytes + len(chunk)) > most:
                        raise StoreError(f"{url} has over {most} bytes, the limit")
                    digest.update(chunk)
                    opened.write(chunk)
            break
        except StoreError as error:
            if not error.may_pass or attempt == NUM_TRIES - 1:
                raise
            time.sleep(2.0**attempt)
    return digest.hexdigest()


def _chunks(url: str) -> Iterator[bytes]:
    import httpx

    scheme, _, rest = url.partition("://")
    with said(f"cannot read {url}"):
        if scheme in EXTRAS:
            with smart_open_file(url, "rb") as opened:
                is_end = False
                while not is_end:  # reading past the end would be another request
                    yield (chunk := opened.read(CHUNK_BYTES))
                    is_end = len(chunk) < CHUNK_BYTES
            return
        if scheme == "hf":  # hf://USER/REPOSITORY/PATH, on the main branch
            user, repository, path = rest.split("/", 2)
            url = f"{HUB}/{user}/{repository}/resolve/main/{path}"
        asked = {"accept-encoding": "identity"}  # the hash is of the uncompressed file

        def check_safe(request: httpx.Request) -> None:
            to = request.url
            if url.startswith("https:") and to.scheme != "https":
                raise StoreError(f"{url} leads to {to.scheme}://{to.host}: not safe")

        hooks, credentials = {"request": [check_safe]}, None
        with contextlib.suppress(OSError):  # there is no home
            credentials = httpx.NetRCAuth()
        with (
            httpx.Client(timeout=SILENCE_S, follow_redirects=True, event_hooks=hooks) as client,
            client.stream("GET", url, headers=asked, auth=credentials) as answer,
        ):
            answer.raise_for_status()
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise StoreError(
                    f"{url} comes as {encoding}: let the server send files as they are"
                )
            yield from answer.iter_raw(CHUNK_BYTES)


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


def smart_open_file(url: str, mode: str) -> Any:
    """Open a file of an object store; raise :class:`MissingExtraError` without its package."""
    scheme, _, path = url.partition("://")
    try:
        import smart_open

        with contextlib.suppress(AttributeError):  # boto3 is not installed
            smart_open.s3.RETRY.exceptions.clear()  # boto3 retries, without tracebacks
        options = {"gs": _google_options, "az": _azure_options}.get(scheme, dict)()
        name = f"{'azure' if scheme == 'az' else scheme}://{path}"
        return smart_open.open(name, mode, compression="disable", transport_params=options)
    except ImportError as error:
        needed = pip_install(EXTRAS[scheme])
        raise MissingExtraError(f"{url} needs what serving does not install: {needed}") from error


def files_below(url: str) -> Iterator[str]:
    """Yield the URLs of the files of an object store below ``url``; raise :class:`StoreError`."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = f"{rest}/".partition("/")
    with said(f"cannot list {url}"):
        if scheme == "s3":
            import boto3

            pages = boto3.client("s3").get_paginator("list_objects_v2")
            names = (
                own["Key"]
                for page in pages.paginate(Bucket=bucket, Prefix=prefix)
                for own in page.get("Contents", ())
            )
        elif scheme == "gs":
            names = (own.name for own in _google().list_blobs(bucket, prefix=prefix))
        else:
            container = _azure_options()["client"].get_container_client(bucket)
            names = (own.name for own in container.list_blobs(name_starts_with=prefix))
        yield from [f"{scheme}://{bucket}/{name}" for name in names]


def remove_file(url: str) -> None:
    """Remove a file of an object store, if it is there; raise :class:`StoreError`."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    try:
        with said(f"cannot remove {url}"):
            if scheme == "s3":
                import boto3

                boto3.client("s3").delete_object(Bucket=bucket, Key=name)
            elif scheme == "gs":
                _google().bucket(bucket).blob(name).delete()
            else:
                _azure_options()["client"].get_blob_client(bucket, name).delete_blob()
    except StoreError as error:
        if error.answered != 404:
            raise


def _google() -> Any:
    from google.cloud import storage

    return storage.Client()


def _google_options() -> dict[str, Any]:
    from google.cloud.storage.retry import DEFAULT_RETRY

    bounds = {"retry": DEFAULT_RETRY.with_timeout(RETRY_S), "timeout": SILENCE_S}
    return {"get_blob_kwargs": bounds, "blob_open_kwargs": bounds}


def _azure_options() -> dict[str, Any]:
    """Return a client of the account in the environment variables of Azure's command line."""
    from azure.identity import DefaultAzureCredential
    from azure.storage.blob import BlobServiceClient

    bounds = dict.fromkeys(("connection_timeout", "read_timeout"), SILENCE_S)
    bounds |= dict.fromkeys(("initial_backoff", "increment_base", "random_jitter_range"), 1)
    bounds |= {"retry_total": 2}  # by default it takes 90 s
    if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return {"client": BlobServiceClient.from_connection_string(connection, **bounds)}
    if not (account := os.environ.get("AZURE_STORAGE_ACCOUNT")):
        raise StoreError(
            "az:// names no account: set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT "
            "and what DefaultAzureCredential takes (a workload's or managed identity, az login)"
        )
    host = f"https://{account}.blob.core.windows.net"
    return {"client": BlobServiceClient(host, DefaultAzureCredential(), **bounds)}


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Turn any error of a store's library, which have no common base, into a line."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        import httpx

        causes = list(_causes(error))
        answered = next(filter(None, map(_status, causes)), None)
        first_line = SECRET.sub("", next(iter(str(error).splitlines()), ""))
        if answered and answered >= 400 and len(error.args) > 1:  # Google's uploads: no text
            first_line = f"the store answered {answered} {http.client.responses.get(answered, '')}"
        raised = StoreError(f"{what}: {type(error).__name__}: {first_line}")
        raised.answered = answered
        if answered is None:
            kinds = (httpx.TransportError, http.client.HTTPException, socket.gaierror)
            of_network = (*kinds, ConnectionError, TimeoutError)
            raised.may_pass = any(isinstance(cause, of_network) for cause in causes)
        else:
            raised.may_pass = answered in (429, *range(500, 600))
        raise raised from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes: smart_open and Azure hide the store's error there."""
    while error is not None:
        yield error
        hidden = getattr(error, "backend_error", None) or getattr(error, "inner_exception", None)
        error = hidden or error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)  # in boto3 a dictionary
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    statuses = (response, getattr(response, "status_code", None), getattr(error, "code", None))
    return next((status for status in statuses if isinstance(status, int)), None)


def split_version(name: str) -> tuple[str, str | None]:
    """Return a set's name or path, and the version after its last ``@``, or None."""
    base, _, version = name.rpartition("@")
    return (base, version) if base and VERSION.fullmatch(version) else (name, None)


def earlier_folders(folder: Path) -> list[Path]:
    """Return the folders of a set's earlier versions, the newest first."""
    folders = [path for path in folder.glob(f"{VERSIONS_NAME}/*") if VERSION.fullmatch(path.name)]
    return sorted(folders, key=modified_ns, reverse=True)


def modified_ns(path: Path) -> int:
    """Return when a folder was last changed; 0 if another process has removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
