"""Turns SIGINT, SIGTERM and SIGHUP into a request to stop, however often they come."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """An event that signal handlers may set.

    ``threading.Event`` could wait for itself: a handler runs in the main thread, which may hold
    the event's lock at that moment. ``SimpleQueue.put`` is documented as reentrant.
    """

    def __init__(self) -> None:
        self._requests = SimpleQueue[None]()

    def set(self) -> None:
        self._requests.put(None)

    def is_set(self) -> bool:
        return not self._requests.empty()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, for ``seconds`` at most; return whether it is."""
        with contextlib.suppress(Empty):
            self._requests.put(self._requests.get(timeout=seconds))  # it stays set
        return self.is_set()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Yield a request that the first SIGINT, SIGTERM or SIGHUP sets; later ones change nothing.

    A second Ctrl-C must not interrupt the cleanup, which would leave processes behind. An ignored
    SIGHUP stays ignored, as nohup sets it. An ignored SIGINT is handled: a shell's ``&`` ignores it
    only against Ctrl-C in the terminal.
    """
    stop = StopRequest()
    is_hang_up_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ours = [n for n in SIGNALS if n != signal.SIGHUP or not is_hang_up_ignored]
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in ours}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
