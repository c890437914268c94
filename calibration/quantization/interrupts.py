"""Keeps Ctrl-C off the main thread's signal stack, which NNCF's use of OpenVINO can leave freed.

A ``Core`` of OpenVINO gives the thread that makes it an alternative signal stack, and takes it back
when it ends. NNCF makes Cores of its own; where one ends after a younger one was made, the thread
is left with a stack that is freed, and the next signal that it handles ends the process with
SIGSEGV. Our own code makes one Core (:mod:`models.runtime`).
"""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted_on_another_thread() -> Iterator[None]:
    """Let another thread take SIGINT while a block runs; the main thread alone may enter it.

    Python's handler only notes the signal there: KeyboardInterrupt is raised in the main thread as
    ever, when it next executes Python. What it waits for in native code is not cut short.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("SIGINT is the main thread's: only it can leave it to another")
    is_over = threading.Event()
    taker = threading.Thread(target=is_over.wait, name="interrupts", daemon=True)
    taker.start()  # before the mask, which threads inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        is_over.set()
        taker.join()
