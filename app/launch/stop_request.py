"""Turns SIGINT, SIGTERM and SIGHUP into a request to stop, however often they come."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a flag: the first asks to stop, later ones change nothing.

    Cleaning up must not be cut short by an impatient second Ctrl-C, or processes stay behind. A
    SIGHUP that is ignored stays so: nohup does that. A script's ``&`` ignores SIGINT, against the
    terminal's Ctrl-C; who sends it to this process asks to stop all the same.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __enter__(self) -> "StopRequest":
        is_hang_up_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        ours = [n for n in SIGNALS if n != signal.SIGHUP or not is_hang_up_ignored]
        self._before = {number: signal.signal(number, self._ask) for number in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._asked.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to ``seconds`` (None: without end); return whether a signal came."""
        return self._asked.wait(seconds)


@contextlib.contextmanager
def ending_on_signal(say: str) -> Iterator[None]:
    """End the process at once, with a last word, if a signal comes that it has a handler for.

    For what hears no signal: Ray's library, while it connects. Nothing has been started then.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_on_byte, args=(reader, say), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _end_on_byte(reader: socket.socket, say: str) -> None:
    with reader:
        if reader.recv(1):  # nothing: the other end was closed
            os.write(2, f"{say}\n".encode())
            os._exit(0)
