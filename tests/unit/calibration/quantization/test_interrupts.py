"""Ctrl-C where the main thread's signal stack is freed, in processes of their own: it may crash."""

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue

from calibration.quantization.interrupts import interrupted_on_another_thread

# As NNCF leaves it: the thread's signal stack is memory that is gone.
FREED_STACK = """
import ctypes, mmap, os, signal

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE = 1 << 16
place = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
assert libc.sigaltstack(ctypes.byref(Stack(place, 0, SIZE)), None) == 0
libc.munmap(place, SIZE)
"""
INTERRUPTED = f"""
import contextlib, time
from calibration.quantization.interrupts import interrupted_on_another_thread
{FREED_STACK}
with BLOCK:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def run_script(block: str) -> "subprocess.CompletedProcess[str]":
    script = INTERRUPTED.replace("BLOCK", block)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_ctrl_c_is_an_interrupt_though_the_signal_stack_is_freed() -> None:
    ended = run_script("interrupted_on_another_thread()")
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def test_without_it_the_process_would_crash() -> None:
    """Or the test above says nothing."""
    assert run_script("contextlib.nullcontext()").returncode == -signal.SIGSEGV


def test_the_thread_and_the_mask_are_gone_after_the_block() -> None:
    before, threads = signal.pthread_sigmask(signal.SIG_BLOCK, ()), threading.active_count()
    with suppress(KeyError), interrupted_on_another_thread():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise KeyError
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert threading.active_count() == threads


def test_only_the_main_thread_may_enter() -> None:
    raised: SimpleQueue[Exception | None] = SimpleQueue()

    def enter() -> None:
        try:
            with interrupted_on_another_thread():
                raised.put(None)
        except RuntimeError as error:
            raised.put(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert isinstance(raised.get(), RuntimeError)
