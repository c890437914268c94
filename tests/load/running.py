"""A ``tandem serve`` for a benchmark: started on a free port, stopped by its pid."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from machine import ROOT

READY_WITHIN_S = 180.0


class Running:
    """A service that is ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, ready_after_s: float) -> None:
        self.process, self.url, self.ready_after_s = process, url, ready_after_s


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_service(*arguments: str) -> Iterator[Running]:
    """Start a service with further arguments of ``tandem serve``; yield it when it is ready."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("tandem")), "serve", "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            waited = time.perf_counter() - started
            if process.poll() is not None or waited > READY_WITHIN_S:
                raise SystemExit(f"tandem serve did not get ready within {waited:.0f} s")
            time.sleep(0.05)
        yield Running(process, url, time.perf_counter() - started)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
