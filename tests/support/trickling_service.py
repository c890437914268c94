"""A service that goes on and on: it reads a request, or writes an answer, a little at a time."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

Trickle = Literal["upload", "headers", "body", "silence", "window"]
PACE_S = 0.05
MOST_S = 60.0  # then it gives up: no test waits longer
SETTINGS, WINDOW_UPDATE = 4, 8  # RFC 9113, section 6
INITIAL_WINDOW_SIZE = 4
UPLOAD_BYTES = 100_000  # of an upload at a time: 2 MB/s, so that each write gets on within a second
# By kind, what it says once a request is there, and what again and again.
HEAD = b"HTTP/1.1 200 OK\r\n"
SAYS = {
    "headers": (HEAD + b"x-slow: ", b"a"),
    "body": (HEAD + b"content-length: 9999\r\n\r\n", b" "),
}


def frame(kind: int, payload: bytes, stream: int = 0) -> bytes:
    """Return an HTTP/2 frame without flags."""
    return (
        struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + struct.pack(">I", stream) + payload
    )


class TricklingService:
    """Listens on a free port of loopback while the ``with`` block runs."""

    def __init__(self, kind: Trickle) -> None:
        self._kind = kind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._released = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._released.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                if self._kind == "upload":
                    self._again(lambda: connection.recv(UPLOAD_BYTES))
                elif self._kind == "window":
                    self._open_window(connection)
                else:
                    connection.recv(65536)
                    first, more = SAYS.get(self._kind, (b"", b""))
                    connection.sendall(first)
                    self._again(lambda: connection.sendall(more))
            except OSError:  # the client hung up
                return

    def _open_window(self, connection: socket.socket) -> None:
        """Let an HTTP/2 client send a byte at a time."""
        connection.sendall(frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))
        connection.settimeout(PACE_S)
        one_more = frame(WINDOW_UPDATE, struct.pack(">I", 1), stream=1)

        def read_and_open() -> None:
            with suppress(TimeoutError):
                connection.recv(4096)
            connection.sendall(one_more)

        self._again(read_and_open)

    def _again(self, act: Callable[[], object]) -> None:
        for _ in range(int(MOST_S / PACE_S)):
            if self._released.wait(PACE_S):
                return
            act()
