"""A real server that answers as the Hugging Face hub does for large files, on a thread.

``HEAD`` and ``GET`` of ``/owner/name/resolve/<revision>/<file>`` are redirected to where the bytes
are, with the commit and the file's sha256 in the headers; the bytes are served with ranges.
"""

from hashlib import sha256

from tests.support.http_server import QuietRequest, ThreadedServer

COMMIT = "c0ffee" * 6 + "abcd"


class Request(QuietRequest):
    """One request to the hub, or to its store of bytes."""

    protocol_version = "HTTP/1.1"
    hub: "HubServer"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.close_connection = True
        self.hub.requests.append((self.command, self.path, self.headers.get("range")))
        if self.path.startswith("/bytes/"):
            self._bytes(self.hub.files[self.path.removeprefix("/bytes/")])
            return
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        if repository in self.hub.renamed:
            to = self.hub.renamed[repository]
            self.send(307, b"", location=f"/{to}/resolve/{rest}")
            return
        revision, _, name = rest.partition("/")
        path = f"{repository}/{name}"
        if repository in self.hub.gated:
            self.send(401, b"", x_error_code="RepoNotFound")
        elif path not in self.hub.files or revision not in ("main", COMMIT):
            self.send(404, b"", x_error_code="EntryNotFound")
        else:
            self._redirect(path)

    def _redirect(self, path: str) -> None:
        digest = self.hub.told_sha256 or sha256(self.hub.files[path]).hexdigest()
        headers = {"x_repo_commit": COMMIT, "x_linked_etag": f'"{digest}"'}
        headers = {key: headers[key] for key in headers if key not in self.hub.withheld}
        self.send(302, b"", location=f"{self.hub.url}/bytes/{path}", **headers)

    def _bytes(self, data: bytes) -> None:
        start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest, left = data[start:], self.hub.breaks_after
        sent = rest if not left else rest[: left.pop(0)]
        headers = {"content_range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self.send(206 if start else 200, sent, content_length=str(len(rest)), **headers)


class HubServer(ThreadedServer):
    """Serves ``files``, by ``owner/name/file``; what is told of them can be changed."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.breaks_after: list[int] = []  # bytes, of the next answers
        self.renamed: dict[str, str] = {}  # repositories, to their new names
        self.gated: set[str] = set()
        self.withheld: set[str] = set()  # headers, with underscores
        self.told_sha256: str | None = None  # in place of the right one
        super().__init__(type("Handler", (Request,), {"hub": self}))
