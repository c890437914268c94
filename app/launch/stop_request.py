"""Turns SIGINT, SIGTERM and SIGHUP into a request to stop, however often they come."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; later ones change nothing.

    A second Ctrl-C must not interrupt the cleanup, which would leave processes behind. An ignored
    SIGHUP stays ignored, as nohup sets it. An ignored SIGINT is handled: a shell's ``&`` ignores it
    only against Ctrl-C in the terminal.
    """
    stop = threading.Event()
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
