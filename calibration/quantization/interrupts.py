"""Keeps Ctrl-C off the main thread's signal stack, which NNCF's use of OpenVINO may free.

An OpenVINO ``Core`` gives its thread an alternative signal stack, and takes it back when it ends.
NNCF makes its own Cores. If one ends after a younger one was made, the thread keeps a freed stack,
and the next signal ends the process with SIGSEGV. Our own code makes a single Core
(:mod:`models.runtime`).
"""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted_on_another_thread() -> Iterator[None]:
    """Let another thread take SIGINT during the block; only the main thread may enter it.

    Python's handler only records the signal there. KeyboardInterrupt is raised in the main thread
    as usual, when it next executes Python. A wait in native code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("SIGINT is the main thread's: only it can leave it to another")
    is_over = threading.Event()
    taker = threading.Thread(target=is_over.wait, name="interrupts", daemon=True)
    taker.start()  # before the mask, which new threads inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        is_over.set()
        taker.join()
