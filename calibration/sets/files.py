"""Files of networks: downloaded, checked before a library opens them, converted if PyTorch's.

A download resumes where it broke off, and is kept only if its hash matches. The bytes go into
``<name>.part``, which is renamed to ``<name>`` after the check: so ``<name>`` is never incomplete.
The Hugging Face hub is first asked for a file's commit and hash. It answers
``/<repository>/resolve/<revision>/<file>`` for a large file with a redirect to its bytes; the
headers of that answer name the commit (X-Repo-Commit) and the file's sha256 (X-Linked-Etag). The
file is then fetched at that commit, so that a resumed download is of the same file.

An ONNX file may name other files for its weights (``TensorProto.external_data``), by any path. A
network that somebody sends must not read files of other folders.

The kind of a PyTorch file is known by the names in its ZIP archive, without loading it. Only a
child process loads it, never a service. A crash or timeout becomes a one-line error, and processes
that the file starts end with the child.
"""

import re
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from calibration.sets.input import TensorLayout
from models.child_process import ChildDiedError, last_words, run_apart
from models.errors import ModelSetError, TandemError, reading
from models.files import make_folder
from models.image import Size
from models.machine import check_installed
from models.onnx_runtime import onnx_facts
from models.record import SUFFIXES, RuntimeName

ONNX = ".onnx"
NUM_READ = 512  # bytes that are read of the beginning of a file
GIT_LFS = b"version https://git-lfs.github.com"
HTML = (b"<!doctype html", b"<html")
HDF5 = b"\x89HDF\r\n\x1a\n"
KERAS_ZIP = {"config.json", "model.weights.h5"}
SAVED_MODEL = "saved_model.pb"
ZIP_MAP = "ZipMap"
# TorchScript (torch.jit.save), or a pickle of torch.save: what is inside says which.
PYTORCH_SUFFIXES = (".pt2", ".pt", ".pth", ".ts", ".torchscript")
Kind = Literal["program", "script"]  # of torch.export.save, of torch.jit.save
INSTEAD = (
    "Save the network with torch.export.save(torch.export.export(module.eval(), (example,), "
    "dynamic_shapes=...), 'net.pt2') and add that with --trust, or export ONNX "
    "(torch.onnx.export), which runs nothing"
)
LIMIT_S = 900.0  # the largest networks convert in two minutes, on a slow machine in ten
TIMEOUT_S = 30.0  # of a request of a download
NUM_TRIES = 4  # each resumes where the last one broke off
MAX_BYTES = 2**31  # no float classifier of this kind is larger
T = TypeVar("T")
ReportProgress = Callable[[int, int | None], None]  # bytes so far, and in all if known
SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_MOVES = 3  # redirects of a renamed repository


def check_file(path: Path) -> set[str]:
    """Check that a file may be a network, and that an ONNX file's other files are in its folder.

    Returns:
        The operators of an ONNX file; none for files of other kinds.

    Raises:
        ModelSetError: it is something else, its output is not a tensor, or weights are missing or
            outside of its folder.
    """
    check_kind(path)
    if path.suffix != ONNX or not path.is_file():
        return set()
    with reading(path):
        facts = onnx_facts(path.read_bytes(), str(path))
    if ZIP_MAP in facts.operators:
        raise ModelSetError(
            f"{path} answers a list of dictionaries (ZipMap, as Custom Vision and scikit-learn "
            "export it): export it again without ZipMap, or cut it behind the softmax"
        )
    for location in sorted(facts.external):
        weights = path.parent / location
        if not weights.resolve().is_relative_to(path.parent.resolve()):
            raise ModelSetError(
                f"{path} keeps weights outside of its folder ({location}): export it again with "
                "its weights inside, or next to it"
            )
        if not weights.is_file():
            raise ModelSetError(
                f"{path} keeps weights in {location}, which is missing: put it next to the file"
            )
    return facts.operators


def check_kind(path: Path) -> None:
    """Raise :class:`ModelSetError` if a file is known to be no network here."""
    if path.name == SAVED_MODEL or (path / SAVED_MODEL).is_file():
        folder = path.parent if path.name == SAVED_MODEL else path
        raise ModelSetError(
            f"{path} is a SavedModel of TensorFlow: convert it with OpenVINO's own command, ovc "
            f"{folder} --output_model net, and add net.xml"
        )
    if path.is_dir():
        raise ModelSetError(f"{path} is a folder: give the network's file")
    try:
        with path.open("rb") as opened:
            start = opened.read(NUM_READ)
    except OSError:  # reported when it is read
        return
    if start.startswith(HDF5) or _is_keras_zip(path, start):
        raise ModelSetError(
            f"{path} is a file of Keras, which Keras alone reads: export it there, as "
            f"keras.models.load_model({path.name!r}).export('net.onnx', format='onnx'), and add "
            "net.onnx"
        )
    if not start:
        raise ModelSetError(f"{path} is empty: download it, or export it again")
    if start.startswith(GIT_LFS):
        raise ModelSetError(
            f"{path} is a pointer of Git LFS, not the network: git lfs pull fetches that"
        )
    if start.lstrip().lower().startswith(HTML):
        raise ModelSetError(
            f"{path} is a web page (HTML), not the network: download the file itself, as its raw "
            "link gives it"
        )


def _is_keras_zip(path: Path, start: bytes) -> bool:
    try:
        with zipfile.ZipFile(path) as opened:
            return start.startswith(b"PK") and set(opened.namelist()) >= KERAS_ZIP
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def kind_of(path: Path) -> Kind:
    """Return the kind of network in a PyTorch file.

    Raises :class:`ModelSetError` if the file has no network: it is damaged, or a pickle of weights
    or of a module.
    """
    try:
        with zipfile.ZipFile(path) as opened:
            names = opened.namelist()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ModelSetError(
            f"{path} is no network of PyTorch ({error}): it was cut short, or is a pickle of "
            f"torch.save. {INSTEAD}"
        ) from error
    if any(name.endswith("/archive_format") for name in names):
        return "program"
    if any("/code/" in name for name in names):
        return "script"
    if any(name.endswith("/data.pkl") for name in names):
        raise ModelSetError(
            f"{path} is a checkpoint of torch.save: weights, or a module without code. {INSTEAD}"
        )
    raise ModelSetError(f"{path} is a ZIP archive, and no network of PyTorch. {INSTEAD}")


def check_trusted(path: Path, *, is_trusted: bool) -> None:
    """Raise :class:`ModelSetError` unless the user has declared a PyTorch file as trusted."""
    if not is_trusted:
        raise ModelSetError(
            f"{path} is a PyTorch file, and to load it is to run code that it holds. If you trust "
            "whoever made it, say --trust: it is loaded once, in a process of its own, and "
            "converted. Else ask for ONNX (torch.onnx.export), which runs nothing"
        )


@dataclass(frozen=True)
class ConversionTask:
    """The task of the child process."""

    path: Path
    kind: Kind
    made: Path  # the IR (.xml) or ONNX file to write
    input_size: Size | None
    layout: TensorLayout | None


@contextmanager
def converted(
    path: Path,
    runtime: RuntimeName,
    input_size: Size | None,
    layout: TensorLayout | None,
    *,
    is_trusted: bool,
    limit_s: float = LIMIT_S,
) -> Iterator[Path]:
    """Convert a PyTorch file for ``runtime``; the file exists during the block.

    Raises:
        MissingExtraError: torch is not installed.
        ModelSetError: the file is not a network, not trusted, or cannot be converted.
    """
    kind = kind_of(path)
    check_trusted(path, is_trusted=is_trusted)
    check_installed("torch", "torch", f"models add of {path.name}")
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as name:
        made = Path(name) / f"network{SUFFIXES[runtime]}"
        task = ConversionTask(path.absolute(), kind, made, input_size, layout)
        log = Path(name) / "log"
        try:
            with log.open("wb") as printed:
                run_apart(convert_here, task, limit_s=limit_s, printed=printed)
        except TimeoutError:
            raise ModelSetError(
                f"{path} was not converted within {limit_s:g} s, and was given up. {INSTEAD}"
            ) from None
        except ChildDiedError as error:
            raise ModelSetError(
                f"{path}: the process that loaded it died ({error}; {last_words(log)}): the file "
                f"is damaged, or of another PyTorch. {INSTEAD}"
            ) from None
        yield made


def convert_here(task: ConversionTask) -> None:
    """Convert in this process, which runs code of the file; see :mod:`pytorch_child`."""
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    from calibration.sets.pytorch_child import convert

    convert(task)


class DownloadError(TandemError):
    """A file could not be downloaded, or differs from the expected one; nothing partial is left."""

    code = "download"


def download(
    url: str,
    path: Path,
    sha256_prefix: str,
    report: ReportProgress = lambda _, __: None,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Download ``url`` to ``path`` unless it exists; proxies are taken from the environment.

    Raises:
        DownloadError: unreachable, refused, too large, a full disk, or another hash.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        if path.is_file() and _sha256_of(path).startswith(sha256_prefix):
            return path  # a damaged file is downloaded again
        make_folder(path.parent)
        trying(url, lambda client: _once(client, url, part, report), what_next(path.name), wait)
        check_hash(part, sha256_prefix)
        part.replace(path)
    except OSError as error:
        raise DownloadError(
            f"cannot write {part}: {error.strerror}; make room, or choose another place"
        ) from error
    return path


def check_hash(path: Path, sha256_prefix: str) -> None:
    """Check a file's hash, which the publisher put into its name; remove a file that differs."""
    try:
        actual = _sha256_of(path)
    except OSError as error:
        raise DownloadError(f"cannot read {path}: {error.strerror}") from error
    if not actual.startswith(sha256_prefix):
        if path.suffix == ".part":
            path.unlink()
        raise DownloadError(
            f"{path.name.removesuffix('.part')} was altered on its way or is damaged: its sha256 "
            f"begins {actual[: len(sha256_prefix)]}, it must begin {sha256_prefix}. "
            "Fetch it again; if it happens twice, somebody between changes it"
        )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def trying(
    url: str, once: Callable[[httpx.Client], T], hint: str, wait: Callable[[float], None]
) -> T:
    """Call ``once``, and again after errors that may pass: no connection, or status 429 or 5xx.

    Raises:
        DownloadError: all tries failed, or the status is another 4xx; ``hint`` ends its message.
    """
    try:
        opened = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True)
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise DownloadError(
            f"the proxy or certificates that the environment names cannot be used: {error}; see "
            "HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        ) from error
    with opened as client:
        for attempt in range(NUM_TRIES):
            is_last = attempt == NUM_TRIES - 1
            try:
                return once(client)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if (status != 429 and status < 500) or is_last:
                    raise DownloadError(f"{url} answers {status}; {hint}") from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if is_last:
                    raise DownloadError(
                        f"cannot reach {url} ({type(error).__name__}: {error}); {hint}"
                    ) from error
            wait(2.0**attempt)
    raise AssertionError("the last try returns or raises")


def what_next(name: str) -> str:
    """Return advice for a user who cannot download the file ``name`` from here."""
    return (
        "behind a proxy, set HTTPS_PROXY; with a mirror, give --mirror URL (timm's: --hub URL); "
        f"offline, fetch {name} elsewhere and give its folder: --weights-dir DIR"
    )


def _once(client: httpx.Client, url: str, part: Path, report: ReportProgress) -> None:
    """Download the bytes that ``part`` lacks."""
    there = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # bytes as published: a range counts those
    if there:
        headers["Range"] = f"bytes={there}-"
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == 416:  # all of it is there, or it is another file by now
            total = _number(answer.headers.get("content-range", "").rpartition("/")[2])
            if total == there:
                return
            part.unlink(missing_ok=True)
            raise httpx.ReadError("the file there is another one now")
        answer.raise_for_status()
        is_resumed = answer.status_code == 206
        there = there if is_resumed else 0
        length = _number(answer.headers.get("content-length"))
        total = None if length is None else there + length
        _check_size(url, part, total or 0)
        with part.open("ab" if is_resumed else "wb") as opened:
            for chunk in answer.iter_raw():  # as they come: httpx loses what it had not handed out
                opened.write(chunk)
                there += len(chunk)
                _check_size(url, part, there)
                report(there, total)
        if total is not None and there < total:
            raise httpx.ReadError(f"broken off at {there} of {total} bytes")


def _check_size(url: str, part: Path, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{url} has {num_bytes} bytes or more; {MAX_BYTES} is the limit")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


@dataclass(frozen=True)
class HubFile:
    """A version of a file on the hub."""

    url: str
    commit: str
    sha256: str


def hub_file(
    hub: str, repository: str, name: str, hint: str, wait: Callable[[float], None] = time.sleep
) -> HubFile:
    """Ask the hub for the newest version of a file of a repository, ``owner/name``.

    ``hint`` is advice for a user who cannot reach the hub, or may not read the repository. Raises
    :class:`DownloadError` if the hub is unreachable, the file missing, private, or without a hash.
    """
    base = f"{hub.rstrip('/')}/{repository}"
    url = f"{base}/resolve/main/{name}"
    answer = trying(url, lambda client: _head(client, url), hint, wait)
    status = answer.status_code
    if status == 404:
        raise DownloadError(
            f"{repository} at {hub} has no {name}: its weights are a pickle, which is never "
            "opened, or in several files. Choose other weights"
        )
    if status in (401, 403):
        raise DownloadError(
            f"{url} answers {status}: there is no repository of that name, or it is private; {hint}"
        )
    if status >= 400:
        raise DownloadError(f"{url} answers {status}; {hint}")
    commit = answer.headers.get("x-repo-commit", "")
    tag = answer.headers.get("x-linked-etag") or answer.headers.get("etag", "")
    sha256 = tag.removeprefix("W/").strip('"')
    if not (SHA256.fullmatch(sha256) and COMMIT.fullmatch(commit)):
        raise DownloadError(
            f"{url} does not tell the commit and the sha256 of the file, as the Hugging Face hub "
            f"does: it cannot be checked; {hint}"
        )
    return HubFile(f"{base}/resolve/{commit}/{name}", commit, sha256)


def _head(client: httpx.Client, url: str) -> httpx.Response:
    """Return the headers; follow redirects to a new repository name, not to the file's bytes."""
    for _ in range(MAX_MOVES):
        answer = client.head(url, follow_redirects=False)
        if answer.status_code >= 500:
            answer.raise_for_status()
        moved = answer.headers.get("location", "")
        if not answer.is_redirect or urlsplit(moved).netloc or "x-linked-etag" in answer.headers:
            return answer
        url = urljoin(url, moved)
    raise httpx.TooManyRedirects(f"{url} was moved more than {MAX_MOVES} times")
