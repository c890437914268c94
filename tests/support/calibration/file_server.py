"""A real server of one file, on a thread; each request is answered as the test's script says."""

from collections.abc import Callable

from tests.support.http_server import QuietRequest, ThreadedServer


class Request(QuietRequest):
    """One request, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    files: "FileServer"

    def do_GET(self) -> None:
        self.close_connection = True
        self.files.requests.append((self.path, self.headers.get("range")))
        script = self.files.script
        (script.pop(0) if len(script) > 1 else script[0])(self)


Answer = Callable[[Request], None]


class FileServer(ThreadedServer):
    """Answers the requests with ``script``, in order, its last entry again and again."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.script: list[Answer] = [ranged]
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        super().__init__(type("Handler", (Request,), {"files": self}))
        self.url += "/net.pth"

    @property
    def ranges(self) -> list[str | None]:
        return [header for _, header in self.requests]


def _start(request: Request) -> int:
    header = request.headers.get("range", "bytes=0-")
    return int(header.removeprefix("bytes=").removesuffix("-"))


def ranged(request: Request) -> None:
    """Answer as a good server does."""
    data, start = request.files.data, _start(request)
    if start == 0:
        request.send(200, data)
    elif start >= len(data):
        request.send(416, b"", content_range=f"bytes */{len(data)}")
    else:
        request.send(206, data[start:], content_range=f"bytes {start}-{len(data) - 1}/{len(data)}")


def whole(request: Request) -> None:
    """Know no ranges."""
    request.send(200, request.files.data)


def status(code: int) -> Answer:
    return lambda request: request.send(code, b"an error page")


def breaks_off(after: int) -> Answer:
    """Promise the rest of the file and send ``after`` bytes of it."""

    def answer(request: Request) -> None:
        rest = request.files.data[_start(request) :]
        code = 206 if "range" in request.headers else 200
        request.send(code, rest[:after], content_length=str(len(rest)))

    return answer


def chunked(request: Request) -> None:
    """Send no length."""
    request.send_response(200)
    request.send_header("transfer-encoding", "chunked")
    request.end_headers()
    data = request.files.data
    for start in range(0, len(data), 10_000):
        part = data[start : start + 10_000]
        request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    request.wfile.write(b"0\r\n\r\n")


def redirect(request: Request) -> None:
    """Send elsewhere what is asked for at ``/net.pth``."""
    if request.path == "/net.pth":
        request.send(302, b"", location="/elsewhere")
    else:
        ranged(request)
