"""Starts and stops a local Ray, or joins a running cluster, and handles signals to stop.

SIGINT, SIGTERM and SIGHUP become one request to stop, however often they come.
"""

import contextlib
import io
import logging
import os
import re
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from app.access import no_passphrase
from app.environment import PROJECT, environment_value
from app.errors import ConfigError, NotReadyError, ServiceEndedError
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
from app.oip.regions import FOLDER
from app.stages.threads import tightest_pids_limit, user_limit
from models.errors import TandemError
from models.files import ForeignError, open_ours
from models.machine import available_cpus

# Serve waits 30 s for its controller, and hangs if that received the signal too, as from systemd.
STOP_PATIENCE_S = 12.0
TIMED_OUT = re.compile(r"tim(ed|e) ?out|in time|seconds", re.IGNORECASE)
# A service of 13 processes has 274 threads on two cores, and more on more cores.
MIN_PROCESSES = 250
MIN_FILES, MAX_FILES = 256, 65_536  # open ones, of each process
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
HTTP2_BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and no SETTINGS
ANSWERS_HTTP2_WITHIN_S = 1.0
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


def raise_file_limit() -> None:
    """Let this process and those it starts open as many files as they may, as Ray does later.

    Raises:
        ConfigError: they are too few for Ray and HAProxy.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < MIN_FILES:
        raise ConfigError(
            f"Ray and the service need {MIN_FILES} open files or more, and ulimit -Hn is {hard}: "
            "raise it (docker run --ulimit nofile=4096, LimitNOFILE of a systemd unit, ulimit -n)"
        )
    most = hard if 0 <= hard < MAX_FILES else MAX_FILES  # -1: as many as there are
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def local_ray(
    metrics_port: int,
    forks: ForkServerProcess | None,
    folder: Path,
    warn: Callable[[str], None],
    titles: Mapping[int, str],
) -> Iterator[None]:
    """Start a local Ray, and stop all of it at the end, even after an error.

    Args:
        metrics_port: where Ray's agent serves its metrics.
        forks: the fork server that starts Ray's Python processes; None: Ray starts them.
        folder: for Ray's files.
        warn: called with a line for each of Ray's processes that dies.
        titles: the names of processes for these lines, by pid.
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
                # Of its object store, which no request uses. Without memory to share it is on disk.
                **({} if os.access(FOLDER, os.W_OK) else {"_plasma_directory": str(folder.parent)}),
                **(WITH_FORKS if has_forks else {}),
            )
        with errors_passed_to(lambda text: warn(in_a_line(text, titles))):
            yield
    finally:  # a Ray that has lost a process does not answer
        _stop_ray(forks, in_order=not isinstance(sys.exception(), ServiceEndedError))


def in_a_line(text: str, titles: Mapping[int, str]) -> str:
    """Shorten Ray's report of a dead process, 900 characters and more, to a line."""
    if died := DIED.search(text):
        pid, why = died.groups()
        title = titles.get(int(pid), "a process")
        return f"{title} of Ray, process {pid}, died: {why}; Serve starts another one"
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

    where = check_address(address, may_be_client)
    try:
        with ending_on_signal("stopped; the cluster did not answer, and nothing was deployed"):
            _connect(where)
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
        with contextlib.redirect_stdout(io.StringIO()):  # as in shut_down_serve
            ray.shutdown()


def check_address(address: str, may_be_client: bool = False) -> str:
    """Raise :class:`ConfigError` if an address is malformed, or nothing listens there.

    Ray itself waits minutes for a cluster that does not exist, and ignores signals meanwhile.
    """
    where = _of_auto() if address == AUTO else address
    if where is None:
        return address  # Ray searches this machine's processes, and reports if there is no cluster
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
        with socket.create_connection((host, port), CONNECTS_WITHIN_S) as connection:
            is_answered = _is_answered(connection)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster at {where}: {getattr(error, 'strerror', None) or error}; start one "
            "with ray start --head"
        ) from error
    if not is_answered:
        raise ConfigError(
            f"what listens at {where} is no Ray head, or wants other TLS than this command's: give "
            "the port of ray start --head (6379), not the dashboard's (8265); with TLS give the "
            "command RAY_USE_TLS, RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY as "
            "the nodes have them"
        )
    return where


def _is_answered(connection: socket.socket) -> bool:
    """Whether a gRPC server answers, over TLS if Ray uses it; also if it says nothing yet."""
    connection.settimeout(ANSWERS_HTTP2_WITHIN_S)
    with contextlib.ExitStack() as stack:
        try:
            if (environment_value("RAY_USE_TLS") or "").lower() in ("1", "true"):
                context = ssl.create_default_context(cafile=environment_value("RAY_TLS_CA_CERT"))
                context.check_hostname = False  # Ray itself compares the addresses it goes on to
                context.set_alpn_protocols(["h2"])
                certificate = environment_value("RAY_TLS_SERVER_CERT") or ""
                key = environment_value("RAY_TLS_SERVER_KEY")
                context.load_cert_chain(certificate, key, no_passphrase)
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(HTTP2_BEGINS)
            return connection.recv(1) == b"\0"  # of SETTINGS; an alert of TLS begins with 21
        except TimeoutError:
            return True
        except (OSError, ValueError):
            return False


def _of_auto() -> str | None:
    """Return Ray's address for ``auto``: a variable's, or this machine's last cluster."""
    if (named := environment_value("RAY_ADDRESS")) not in (None, AUTO):
        return named
    place = environment_value("RAY_TMPDIR", "TMPDIR") or "/tmp"
    file = Path(place, "ray", CURRENT)
    try:
        with open(open_ours(file, os.O_RDONLY), encoding="utf-8") as opened:  # noqa: PTH123
            return opened.read().strip() or None
    except ForeignError as error:  # it would lead to a cluster of theirs
        raise ConfigError(
            f"--address auto: {file}: {error.strerror}; give HOST:PORT of your cluster's head node"
        ) from error
    except OSError:
        return None


def metrics_urls() -> list[str]:
    """Return the URLs of each node's metrics for Prometheus: Ray's, Serve's and ours."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    places = [joined(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in alive]
    return [f"http://{place}/metrics" for place in places]


def _stop_ray(forks: ForkServerProcess | None, *, in_order: bool) -> None:
    import ray

    ours = psutil.Process().children(recursive=True)
    if in_order and ray.is_initialized():
        # Ray prints to stdout that the controller, which was asked to end, has ended.
        with contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(Exception):  # a dead cluster cannot be shut down in order
                if (client := serve_client()) and CONTROLLER.fits():
                    shut_down_serve(client)
            ours += psutil.Process().children(recursive=True)
            ray.shutdown()
    if forks is not None:
        ask_to_end(forks)  # it ends its forks during the wait for all
    _, alive = psutil.wait_procs(set(ours), timeout=5 if in_order else 0)
    for _ in range(3):  # a process may start another one meanwhile
        alive = [*alive, *psutil.Process().children(recursive=True)]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(alive, timeout=2)


def has_starting_replica() -> bool:
    """Whether Serve's controller says within :data:`ANSWERS_WITHIN_S` that a replica starts."""
    with contextlib.suppress(Exception):  # the controller does not answer, or Ray is dead
        applications = serve_details(serve_client(), ANSWERS_WITHIN_S)["applications"].values()
        stages = [stage for app in applications for stage in app["deployments"].values()]
        return any(r["state"] == "STARTING" for stage in stages for r in stage["replicas"])
    return False


def shut_down_serve(client: Any) -> None:
    """End the applications, then Serve; do nothing if the controller does not answer."""
    # Ray prints to stdout that the controller, which was asked to end, has ended.
    with contextlib.redirect_stdout(io.StringIO()):
        # A controller that does not answer would not obey a shutdown either.
        ends = time.monotonic() + STOP_PATIENCE_S
        if drain(client, STOP_PATIENCE_S):
            client.shutdown(max(ANSWERS_WITHIN_S, ends - time.monotonic()))


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
        return list(serve_details(client, ANSWERS_WITHIN_S)["applications"])

    # The controller or Ray may be slow or dead: then there are no replicas to wait for.
    with contextlib.suppress(Exception):
        client.delete_apps(applications(), blocking=False)
        while applications() and time.monotonic() < ends:
            time.sleep(POLL_EVERY_S)
        return True
    return False


class StopRequest:
    """An event that signal handlers may set, and that can be waited for together with files.

    ``threading.Event`` could wait for itself: a handler runs in the main thread, which may hold
    the event's lock at that moment.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set very often
            os.write(self._writer, b"\0")

    def is_set(self) -> bool:
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, for ``seconds`` at most; return whether it is."""
        return bool(wait([self._reader], seconds))


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
