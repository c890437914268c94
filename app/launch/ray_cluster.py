"""Starts and stops a local Ray, or joins a running cluster, and handles signals to stop.

SIGINT, SIGTERM and SIGHUP become one request to stop, however often they come.
"""

import contextlib
import io
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from app.environment import PROJECT, environment_value
from app.errors import ConfigError, NotReadyError
from app.launch.checks import joined
from app.launch.forks import CLIENT, ForkServerProcess, ask_to_end, end_server
from app.launch.ray_features import (
    CONTROLLER,
    FORKS,
    errors_passed_to,
    init_ray,
    only_what_one_machine_needs,
    serve_client,
    serve_details,
)
from app.stages.threads import tightest_pids_limit, user_limit
from models.errors import TandemError
from models.machine import available_cpus

# Serve waits 30 s for its controller, and hangs if that received the signal too, as from systemd.
STOP_PATIENCE_S = 12.0
TIMED_OUT = re.compile(r"tim(ed|e) ?out|in time|seconds", re.IGNORECASE)
# A service of 13 processes has 274 threads on two cores, and more on more cores.
MIN_PROCESSES = 250
DIED = re.compile(r"Worker PID: (\d+).*?Worker exit detail: ([^.]*)", re.DOTALL)
LONGEST_LINE = 200
# Workers that are started ahead belong to no job, so the fork server would not start them.
WITH_FORKS = {"_system_config": {"prestart_worker_first_driver": False}}
MIN_CPUS = 2  # Ray gets at least this, so that one core serves configs/separate.yaml too
ANSWERS_WITHIN_S = 3.0  # time limit for a healthy controller
POLL_EVERY_S = 0.1
LOCAL, AUTO = "local", "auto"  # Ray's own names for addresses
CLIENT_SCHEME = "ray://"
HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
CONNECTS_WITHIN_S = 5.0
MAX_ATTEMPTS, CLIENT_FAILED = 4, "Initialization failure from server"
CURRENT = "ray_current_cluster"  # the file in which Ray keeps the address of this machine's cluster
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _init_ray(**options: Any) -> None:
    """Connect to Ray without its log output, from the project's folder.

    Ray's workers import from the connecting process's working folder first. A user's folder may
    have another "app", or a "requests.py".
    """
    with _working_in(PROJECT):
        init_ray(namespace="serve", log_to_driver=False, logging_level=logging.ERROR, **options)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Work in a folder; like ``contextlib.chdir``, from a folder that is gone or closed too."""
    before = None
    with contextlib.suppress(OSError):
        before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):  # this account cannot enter it
                os.chdir(before)


def check_processes() -> None:
    """Raise :class:`ConfigError` if this process's limit of processes is too low for Ray."""
    limits = {"the control group's pids.max": tightest_pids_limit(), "ulimit -u": user_limit()}
    for name, limit in limits.items():
        if limit.left < MIN_PROCESSES:
            raise ConfigError(
                f"Ray and the service need {MIN_PROCESSES} processes and threads or more, and "
                f"{name}, {limit.most:g}, leaves {limit.left:g}: raise it (docker run "
                "--pids-limit, TasksMax of a systemd unit, ulimit -u)"
            )


@contextlib.contextmanager
def local_ray(
    metrics_port: int, forks: ForkServerProcess | None, folder: Path, warn: Callable[[str], None]
) -> Iterator[None]:
    """Start a local Ray, and stop all of it at the end, even after an error.

    Args:
        metrics_port: where Ray's agent serves its metrics.
        forks: the fork server that starts Ray's Python processes; None: Ray starts them.
        folder: for Ray's files.
        warn: called with a line for each of Ray's processes that dies.

    """
    try:
        has_forks = forks is not None and FORKS.fits()
        if forks is not None and not has_forks:
            end_server(forks)
        with only_what_one_machine_needs(CLIENT if has_forks else None), _start_failures_reported():
            _init_ray(
                address=LOCAL,
                num_cpus=max(MIN_CPUS, available_cpus()),
                include_dashboard=False,
                _temp_dir=str(folder),
                _metrics_export_port=metrics_port,
                **(WITH_FORKS if has_forks else {}),
            )
        with errors_passed_to(lambda text: warn(in_a_line(text))):
            yield
    finally:
        _stop_ray(forks)


def in_a_line(text: str) -> str:
    """Shorten Ray's report of a dead process, 900 characters and more, to a line."""
    if died := DIED.search(text):
        pid, why = died.groups()
        return f"process {pid} of Ray died: {why}; of a replica Serve starts another one"
    return " ".join(text.split()).partition(". ")[0][:LONGEST_LINE]


@contextlib.contextmanager
def _start_failures_reported() -> Iterator[None]:
    """Turn the bare Exception of a failed start of Ray into a :class:`ConfigError` of a line."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        reason = str(error).partition(". ")[0].strip() or type(error).__name__
        late = ". Much else may start at the same time on this machine: try again"
        raise NotReadyError(
            f"Ray did not start: {reason}{late if TIMED_OUT.search(reason) else ''}"
        ) from error


def _connect(address: str) -> None:
    """Connect to a cluster; again where its process for this client died at its start.

    The head forks while its threads use gRPC: now and then a child crashes at once.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return _init_ray(address=address)
        except ConnectionError as error:
            if CLIENT_FAILED not in str(error) or attempt == MAX_ATTEMPTS:
                raise


@contextlib.contextmanager
def joined_ray(address: str, may_be_client: bool = False) -> Iterator[None]:
    """Connect to a running cluster; with ``may_be_client`` an address ray:// is accepted too."""
    import ray

    check_address(address, may_be_client)
    try:
        with ending_on_signal("stopped; the cluster did not answer, and nothing was deployed"):
            _connect(address)
    except ConnectionError as error:
        why = str(error).strip().splitlines()[-1:] or [type(error).__name__]  # not a traceback
        raise ConfigError(
            f"no Ray cluster at {address}: {why[0]}; start one with ray start --head"
        ) from error
    except RuntimeError as error:  # the cluster has another version of Ray or Python
        raise ConfigError(f"cannot join the Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str, may_be_client: bool = False) -> None:
    """Raise :class:`ConfigError` if an address is malformed, or nothing listens there.

    Ray itself waits minutes for a cluster that does not exist, and ignores signals meanwhile.
    """
    where = _of_auto() if address == AUTO else address
    if where is None:
        return  # Ray searches the processes of this machine, and reports if there is no cluster
    parts = HOST_AND_PORT.fullmatch(where.removeprefix(CLIENT_SCHEME) if may_be_client else where)
    if parts is None:
        outside = f", or {CLIENT_SCHEME}HOST:10001 from outside the cluster"
        further = outside if may_be_client else ""
        raise ConfigError(
            f"--address {address}: {where} is no address; give auto, or HOST:PORT of the cluster's "
            f"head node, as ray start --head prints it{further}"
        )
    try:
        host, port = parts["host"].strip("[]"), int(parts["port"])
        socket.create_connection((host, port), CONNECTS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster at {where}: {getattr(error, 'strerror', None) or error}; start one "
            "with ray start --head"
        ) from error


def _of_auto() -> str | None:
    """Return Ray's address for ``auto``: a variable's, or this machine's last cluster."""
    if (named := environment_value("RAY_ADDRESS")) not in (None, AUTO):
        return named
    place = environment_value("RAY_TMPDIR", "TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(place, "ray", CURRENT).read_text("utf-8").strip() or None
    return None


def metrics_urls() -> list[str]:
    """Return the URLs of each node's metrics for Prometheus: Ray's, Serve's and ours."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    places = [joined(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in alive]
    return [f"http://{place}/metrics" for place in places]


def _stop_ray(forks: ForkServerProcess | None) -> None:
    import ray

    ours = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        # Ray prints to stdout that the controller, which was asked to end, has ended.
        with contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(Exception):  # a dead cluster cannot be shut down in order
                client = serve_client()
                # A controller that does not answer would not obey a shutdown either.
                if client and CONTROLLER.fits() and drain(client, STOP_PATIENCE_S):
                    client.shutdown(STOP_PATIENCE_S)
            ours += psutil.Process().children(recursive=True)
            ray.shutdown()
    if forks is not None:
        ask_to_end(forks)  # it ends its forks during the wait for all
    _, alive = psutil.wait_procs(set(ours), timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def drain(client: Any, timeout_s: float) -> bool:
    """Delete the applications while HAProxy still runs and can pass their last answers on.

    Serve's shutdown ends both at the same time. A controller that received the signal too does not
    answer, so every call here has a time limit. ``serve.status()`` has none, and a thread still in
    it when Ray shuts down crashes with a segmentation fault.

    Args:
        client: Serve's client of its controller.
        timeout_s: the time for the replicas, once the controller has answered.

    Returns:
        Whether the controller answered.

    """
    ends = time.monotonic() + timeout_s

    def applications() -> list[str]:
        left_s = max(POLL_EVERY_S, min(ANSWERS_WITHIN_S, ends - time.monotonic()))
        return list(serve_details(client, left_s)["applications"])

    # The controller or Ray may be slow or dead: then there are no replicas to wait for.
    with contextlib.suppress(Exception):
        client.delete_apps(applications(), blocking=False)
        while applications() and time.monotonic() < ends:
            time.sleep(POLL_EVERY_S)
        return True
    return False


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

    def end_on_byte() -> None:
        with reader:
            if reader.recv(1):  # no byte: the other end was closed
                os.write(2, f"{say}\n".encode())
                os._exit(0)

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=end_on_byte, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
