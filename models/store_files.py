"""Files in object stores and on web servers: reads, hashes and writes them, explains errors."""

import contextlib
import hashlib
import http.client
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import ModelSetError, TandemError
from models.extras import MissingExtraError, pip_install

if TYPE_CHECKING:  # httpx brings rich and pygments: 10 MB for each process that serves
    import httpx

EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # read by smart_open; WEB schemes over HTTP
CLIENTS = {"s3": "boto3", "gs": "google-cloud-storage", "az": "azure-identity"}
OBJECT_STORES = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
WEB = ("https", "http", "hf")
HUB = "https://huggingface.co"
CHUNK_BYTES = 2**20
NUM_TRIES = 3
SILENCE_S = 30.0
RETRY_S = 10.0  # how long Google's client retries; its default is 120
SECRET = re.compile(r"(?<=//)[^/\s]+@|\?[^\s'\"]+")  # secrets of URLs, in messages of libraries


class StoreError(ModelSetError):
    """A store cannot be read or written, or what it has is not what the manifest says."""

    code = "store"
    answered: int | None = None  # the HTTP status of the store
    may_pass = False  # whether a retry may succeed


def copy_file(url: str, target: Path, most: int) -> str:
    """Copy a file of the store and return its SHA-256; retries after temporary errors.

    Raises:
        StoreError: the file does not exist, is unreadable, or has more than ``most`` bytes.

    """
    target.parent.mkdir(parents=True, exist_ok=True)
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
        hooks = {"request": [_stays_safe(url)]}
        with (
            httpx.Client(timeout=SILENCE_S, follow_redirects=True, event_hooks=hooks) as client,
            client.stream("GET", url, headers=asked, auth=_credentials()) as answer,
        ):
            answer.raise_for_status()
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise StoreError(
                    f"{url} comes as {encoding}: let the server send files as they are"
                )
            yield from answer.iter_raw(CHUNK_BYTES)


def _credentials() -> "httpx.NetRCAuth | None":
    """Return the user's netrc credentials by host; None without a home."""
    import httpx

    with contextlib.suppress(OSError):
        return httpx.NetRCAuth()
    return None


def _stays_safe(url: str) -> "Callable[[httpx.Request], None]":
    """Return a hook that refuses redirects from https to http."""

    def check(request: "httpx.Request") -> None:
        if url.startswith("https:") and request.url.scheme != "https":
            raise StoreError(f"{url} leads to {request.url.scheme}://{request.url.host}: not safe")

    return check


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


def _google_options() -> dict[str, Any]:
    """Limit how long Google's client retries."""
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
        causes = list(_causes(error))
        answered = next(filter(None, map(_status, causes)), None)
        first_line = SECRET.sub("", next(iter(str(error).splitlines()), ""))
        if answered and answered >= 400 and len(error.args) > 1:  # Google's uploads: no text
            first_line = f"the store answered {answered} {http.client.responses.get(answered, '')}"
        raised = StoreError(f"{what}: {type(error).__name__}: {first_line}")
        raised.answered = answered
        is_network = any(map(_is_of_network, causes))
        raised.may_pass = (
            is_network if raised.answered is None else raised.answered in (429, *range(500, 600))
        )
        raise raised from error


def _is_of_network(error: BaseException) -> bool:
    import httpx

    kinds = (httpx.TransportError, http.client.HTTPException, socket.gaierror)
    return isinstance(error, (*kinds, ConnectionError, TimeoutError))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes: smart_open and Azure hide the store's error there."""
    while error is not None:
        yield error
        hidden = getattr(error, "backend_error", None) or getattr(error, "inner_exception", None)
        error = hidden or error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the store's HTTP status, or None."""
    response = getattr(error, "response", None)  # in boto3 a dictionary
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    statuses = (response, getattr(response, "status_code", None), getattr(error, "code", None))
    return next((status for status in statuses if isinstance(status, int)), None)
