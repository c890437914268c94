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

    A second Ctrl-C must not interrupt the cleanup, which would leave processes behind. An ignored
    SIGHUP stays ignored, as nohup sets it. An ignored SIGINT is handled: a shell's ``&`` ignores it
    only against Ctrl-C in the terminal.
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
        return self._asked.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to ``seconds`` (None: no limit); return whether a signal arrived."""
        return self._asked.wait(seconds)


@contextlib.contextmanager
def ending_on_signal(say: str) -> Iterator[None]:
    """End the process at once, with the message ``say``, if a signal with a handler arrives.

    For calls that ignore signals: Ray's library while it connects. Nothing has been started then.
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
        if reader.recv(1):  # no byte: the other end was closed
            os.write(2, f"{say}\n".encode())
            os._exit(0)
