"""Asks the Hugging Face hub for a file's commit and hash before the file is downloaded.

The hub answers ``/<repository>/resolve/<revision>/<file>`` for a large file with a redirect to its
bytes; the headers of that answer name the commit (X-Repo-Commit) and the file's sha256
(X-Linked-Etag). The file is then fetched at that commit, so that a resumed download is of the same
file.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

from calibration.sets.download import DownloadError, trying

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_MOVES = 3  # redirects of a renamed repository


@dataclass(frozen=True)
class HubFile:
    """A version of a file on the hub."""

    url: str
    commit: str
    sha256: str


def hub_file(
    hub: str, repository: str, name: str, hint: str, wait: Callable[[float], None] = time.sleep
) -> HubFile:
    """Ask the hub for the newest version of a file.

    Args:
        hub: base URL.
        repository: ``owner/name``.
        name: of the file.
        hint: advice for a user who cannot reach the hub, or may not read the repository.
        wait: sleeps between tries; seconds.

    Raises:
        DownloadError: the hub is unreachable, the file missing, private, or without a hash.

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
