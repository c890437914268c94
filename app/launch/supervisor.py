"""Watches a local service: the processes without which it cannot go on, and its own readiness.

Serve itself replaces the controller, the proxies, HAProxy and the replicas. Nobody replaces Ray's
own processes or the fork server. When one of these ends, or the service stays unready, accepted
requests are answered and all processes are killed. The command then ends with an error, so that
systemd or a container's restart policy starts it again.
"""

import contextlib
import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from threading import Event, Thread
from typing import NamedTuple

import httpx
import psutil

from app.environment import environment_value
from app.errors import ServiceEndedError
from app.launch.forks import SERVER_MODULE
from app.launch.haproxy import HAPROXY, RENEWAL_EVERY_S, HaproxyCommand
from app.launch.ray_cluster import StopRequest
from models.machine import num_oom_kills

# What users call a process that is needed, by the end of one of the first words of its command line
# and its distance from this process: at first its own children have the same command line.
NEEDED = {
    (SERVER_MODULE, 1): "the fork server",
    ("/raylet/raylet", 1): "Ray's raylet",
    ("/gcs/gcs_server", 1): "Ray's gcs_server",
    ("ray::DashboardAgent", 2): "Ray's DashboardAgent",
    ("ray::RuntimeEnvAgent", 2): "Ray's RuntimeEnvAgent",
}
REPLACED = "HAProxy"  # by Serve
LOOK_EVERY_S, ASK_EVERY_S, LIST_EVERY_S = 1.0, RENEWAL_EVERY_S, 30.0
UNREADY_LOOKS = 60  # Serve replaces a replica that hangs in less (docs/faults.md)
STARTING_LOOKS = 300  # while a replica starts, as for the start of the service
DRAINS_WITHIN_S = 3.0
OUT_OF_MEMORY = "memory ran out: the kernel's OOM killer ended a process of this control group"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, on Linux, so that all can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Watched(NamedTuple):
    process: psutil.Process
    name: str
    fd: int | None  # a pidfd, where the system has them

    def has_ended(self) -> bool:
        if self.fd is not None:
            return bool(wait([self.fd], 0))
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.process.status() == psutil.STATUS_ZOMBIE
        return True

    def how(self) -> str:
        """Return how it ended, if this process started it."""
        text = "ended"
        with contextlib.suppress(ChildProcessError, AttributeError):  # macOS: from Python 3.13 on
            left = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if left is not None and left.si_code == os.CLD_EXITED:
                text = f"ended with exit code {left.si_status}"
            elif left is not None:
                text = f"was ended by {signal.Signals(left.si_status).name}"
        return f"{self.name}, process {self.process.pid}, {text}"


class Processes:
    """Watches the needed descendants of this process and HAProxy; ``titles`` gets all names."""

    def __init__(self, titles: dict[int, str], warn: Callable[[str], None]) -> None:
        self._titles, self._warn = titles, warn
        self._watched: dict[int, _Watched] = {}
        self._num_oom_kills = num_oom_kills()
        self.refresh()

    def look(self, stop: StopRequest, timeout_s: float) -> None:
        """Return when a process has ended, ``stop`` is set, or the time is over.

        Raises:
            ServiceEndedError: a process has ended without which the service cannot go on.

        """
        fds = [watched.fd for watched in self._watched.values() if watched.fd is not None]
        wait([stop.fileno(), *fds], timeout_s)
        ended = [watched for watched in self._watched.values() if watched.has_ended()]
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        memory = OUT_OF_MEMORY if self._num_oom_kills > before else ""
        if stop.is_set():  # a signal to all processes ends them too
            return
        if lost := [watched for watched in ended if watched.name != REPLACED]:
            self._pause()
            what = " and ".join(watched.how() for watched in lost)
            raise ServiceEndedError(f"{what}{memory and f' ({memory})'}")
        if memory:
            self._warn(memory)
        self._reap()
        if ended or time.monotonic() - self._listed_at > LIST_EVERY_S:
            self.refresh()
        if ended and REPLACED not in (watched.name for watched in self._watched.values()):
            self._warn(f"{ended[0].how()}; Serve starts another one")

    def refresh(self) -> None:
        """Look which processes there are; Ray's agents get their titles seconds after its start."""
        self._listed_at = time.monotonic()
        for pid, watched in [*self._watched.items()]:
            if watched.has_ended():
                del self._watched[pid]
                if watched.fd is not None:
                    os.close(watched.fd)
        if len(self._titles) > 1000:
            self._titles.clear()
        distances = {os.getpid(): 0}
        for process in psutil.Process().children(recursive=True):  # parents come first
            with contextlib.suppress(psutil.Error):
                pid, words = process.pid, process.cmdline()[:4] or [""]
                distances[pid] = distances.get(process.ppid(), 9) + 1
                name = REPLACED if process.name() == HAPROXY else None
                for (ending, distance), needed in NEEDED.items():
                    if distances[pid] == distance and any(w.endswith(ending) for w in words):
                        name = needed
                if title := name or words[0]:  # one that is ending has none any more
                    self._titles[pid] = title
                if name and pid not in self._watched:
                    self._watched[pid] = _Watched(process, name, _pidfd(pid))

    def _pause(self) -> None:
        """Stop Ray's other processes, which would end the replicas that still answer."""
        for watched in self._watched.values():
            if watched.name != REPLACED:
                with contextlib.suppress(psutil.Error):
                    watched.process.suspend()

    def _reap(self) -> None:
        """Wait for an adopted process that has ended, but for none that is watched."""
        with contextlib.suppress(ChildProcessError, AttributeError):  # as above
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_pid not in self._watched:
                os.waitpid(ended.si_pid, 0)


def _pidfd(pid: int) -> int | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel, or the process has ended
            return os.pidfd_open(pid)
    return None


class Readiness:
    """Asks the service on a thread whether it is ready, since an answer may take seconds.

    ``ask`` returns "" if it is, else the reason. Looks are counted, not seconds, which go on while
    Ctrl-Z stops this process.
    """

    def __init__(self, ask: Callable[[], str], is_starting: Callable[[], bool]) -> None:
        self._ask, self._is_starting = ask, is_starting
        self._looks, self._has_answered = 0, True
        self._reason = ""
        self.waits = False  # for a replica that starts

    def ask_until(self, over: Event) -> None:
        """Ask every few seconds, on a thread."""
        while not over.wait(LOOK_EVERY_S if self._reason else ASK_EVERY_S):
            try:
                self._reason = self._ask()
            except Exception as error:  # whatever it is, the next look may succeed
                self._reason = f"{type(error).__name__}: {error}"
            self._has_answered = self._has_answered or not self._reason

    def look(self) -> str:
        """Return "" or why the service is not ready; raise ServiceEndedError after too long."""
        self._looks = 0 if self._has_answered else self._looks + 1
        self._has_answered = self.waits = False
        if self._looks < UNREADY_LOOKS:
            return self._reason
        reason, unready_s = self._reason or "no answer", self._looks * LOOK_EVERY_S
        if self._looks < STARTING_LOOKS and self._is_starting():
            self.waits = True
            return reason
        raise ServiceEndedError(f"/readyz has failed for {unready_s:g} s ({reason})")


def ask_of(client: httpx.Client) -> str:
    """Return "" if the service says that it is ready, and else the reason."""
    try:
        status = client.get("/readyz").status_code
    except httpx.HTTPError as error:
        return type(error).__name__
    return "" if status in (200, 429) else f"status {status}"  # 429: it is full


def supervise(
    stop: StopRequest, processes: Processes, readiness: Readiness, haproxy: HaproxyCommand
) -> None:
    """Return once ``stop`` is set.

    Raises:
        ServiceEndedError: the service cannot go on; HAProxy answered what it had accepted.

    """
    watchdog = environment_value("WATCHDOG_USEC") or ""
    every_s = min(ASK_EVERY_S, int(watchdog) / 2e6) if watchdog.isdecimal() else math.inf
    state, fed_at, over = "", 0.0, Event()
    processes.refresh()
    for watch, name in ((readiness.ask_until, "readiness"), (haproxy.follow_keys, "keys")):
        Thread(target=watch, args=(over,), name=name, daemon=True).start()
    try:
        while not stop.is_set():
            processes.look(stop, min(LOOK_EVERY_S, every_s))
            reason, now = readiness.look(), time.monotonic()
            if state != (state := f"STATUS={f'not ready: {reason}' if reason else 'ready'}"):
                notify_systemd(state)
            if (not reason or readiness.waits) and now - fed_at >= every_s:
                fed_at = now
                notify_systemd("WATCHDOG=1")
    except ServiceEndedError:
        notify_systemd("STOPPING=1")
        haproxy.drain(DRAINS_WITHIN_S)
        raise
    finally:
        over.set()


def notify_systemd(state: str) -> None:
    """Send a state like ``READY=1`` if systemd waits for it (``Type=notify``); else do nothing.

    Failures need no report: systemd ends a service that is not ready within ``TimeoutStartSec``.
    """
    if address := environment_value("NOTIFY_SOCKET"):
        name = f"\0{address[1:]}" if address.startswith("@") else address  # Linux's abstract socket
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_systemd,
        ):
            to_systemd.settimeout(1.0)  # systemd may hang
            to_systemd.connect(name)
            to_systemd.sendall(state.encode())
