"""A ``tandem serve`` for a benchmark: started on a free port, stopped by its pid."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from machine import ROOT

from app.launch.checks import free_port
from tests.support.services.ends_with_parent import ending_with_parent

READY_WITHIN_S = 180.0
TANDEM = str(Path(sys.executable).with_name("tandem"))


class Running:
    query = "top_k=1"  # of its requests

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, ready_after_s: float) -> None:
        self.process, self.url, self.ready_after_s = process, url, ready_after_s

    def asked(self, query: str) -> "Running":
        """Return the same service, of which ``query`` is asked as well."""
        other = Running(self.process, self.url, self.ready_after_s)
        other.query = f"{self.query}&{query}"
        return other


@contextlib.contextmanager
def running(command, environment=None, *, folder=ROOT, port=None):
    """Start a command in ``folder``; yield it when it is ready, stop it by SIGINT.

    It is told a free port by ``--port``, unless it knows ``port`` already.
    """
    # A benchmark that is told to end (timeout does) must not leave its service behind. One that is
    # killed does not either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if port is None:
        port = free_port()
        command = [*command, "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(
        ending_with_parent(command),
        cwd=folder,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            waited = time.perf_counter() - started
            if process.poll() is not None or waited > READY_WITHIN_S:
                raise SystemExit(f"{command[0]} did not get ready within {waited:.0f} s")
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
