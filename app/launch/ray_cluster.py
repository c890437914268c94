"""Starts and stops a local Ray, or joins a running cluster."""

import contextlib
import io
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from app.compute.child_process import Child
from app.compute.group_limits import tightest_pids_limit, user_limit
from app.environment import PROJECT, environment_value
from app.errors import ConfigError, NotReadyError
from app.launch.forks.running import CLIENT
from app.launch.ray_features import CONTROLLER, FORKS
from app.launch.ray_internals import (
    ServeClient,
    errors_told_to,
    init_ray,
    only_what_one_machine_needs,
)
from app.launch.stop_request import ending_on_signal
from models.cpus import available_cpus
from models.errors import TandemError

# Serve waits 30 s for a controller that got the signal too, as systemd sends it, and hangs.
STOP_PATIENCE_S = 12.0
TIMED_OUT = re.compile(r"tim(ed|e) ?out|in time|seconds", re.IGNORECASE)
# A service of 13 processes has 274 threads on two cores, and more on more.
MIN_PROCESSES = 250
DIED = re.compile(r"Worker PID: (\d+).*?Worker exit detail: ([^.]*)", re.DOTALL)
LONGEST_LINE = 200
MIN_CPUS = 2  # what Ray is told at least: a machine with one serves configs/separate.yaml too
ANSWERS_WITHIN_S = 3.0  # a controller that is well
POLL_EVERY_S = 0.1
LOCAL, AUTO = "local", "auto"  # Ray's own names for addresses
HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
CONNECTS_WITHIN_S = 5.0
CURRENT = "ray_current_cluster"  # the file in which Ray keeps where this machine's cluster is


def _init_ray(**options: Any) -> None:
    """Connect to Ray, quietly, from the project's own folder.

    Ray's workers import from the working folder of who connects before all others: in a user's
    there may be another "app", or a "requests.py".
    """
    with contextlib.chdir(PROJECT):
        init_ray(namespace="serve", log_to_driver=False, logging_level=logging.ERROR, **options)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def check_processes() -> None:
    """Raise :class:`ConfigError` if Ray cannot start within this process's limits of processes."""
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
    metrics_port: int, forks: Child | None, folder: Path, warn: Callable[[str], None]
) -> Iterator[None]:
    """Start a Ray of our own and stop all of it after, whatever happens in between.

    ``forks`` starts its Python processes; None: Ray does. Its files are in ``folder``; ``warn``
    gets a line for each of its processes that dies.
    """
    try:
        if forks is not None and not FORKS.fits():
            forks.end()
        client = CLIENT if forks is not None else None
        with only_what_one_machine_needs(client), _start_failures_told():
            _init_ray(
                address=LOCAL,
                num_cpus=max(MIN_CPUS, available_cpus()),
                include_dashboard=False,
                _temp_dir=str(folder),
                _metrics_export_port=metrics_port,
                # Those would be nobody's job's, and so none of the fork server's.
                _system_config={"prestart_worker_first_driver": False},
            )
        with errors_told_to(lambda text: warn(in_a_line(text))):
            yield
    finally:
        _stop_ray(forks)


def in_a_line(text: str) -> str:
    """Return what Ray says of a process that died, 900 characters and more, in a line."""
    if died := DIED.search(text):
        pid, why = died.groups()
        return f"process {pid} of Ray died: {why}; of a replica Serve starts another one"
    return " ".join(text.split()).partition(". ")[0][:LONGEST_LINE]


@contextlib.contextmanager
def _start_failures_told() -> Iterator[None]:
    """Turn what Ray raises when it does not start, a bare Exception, into a line for the user."""
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


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Connect to a cluster that somebody else started."""
    import ray

    check_address(address)
    try:
        with ending_on_signal("stopped; the cluster did not answer, and nothing was deployed"):
            _init_ray(address=address)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster at {address}: {error}; start one with ray start --head"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise :class:`ConfigError` if an address is none, or nobody listens there.

    Ray itself waits for minutes for a cluster that is not there, and hears no signal meanwhile.
    """
    where = _of_auto() if address == AUTO else address
    if where is None:
        return  # Ray looks at the processes of this machine, and says so if there is none
    parts = HOST_AND_PORT.fullmatch(where)
    if parts is None:
        raise ConfigError(
            f"--address {address}: {where} is no address; give auto, or HOST:PORT of the cluster's "
            "head node, as ray start --head prints it"
        )
    try:
        host, port = parts["host"].strip("[]"), int(parts["port"])
        with socket.create_connection((host, port), CONNECTS_WITHIN_S):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster at {where}: {getattr(error, 'strerror', None) or error}; start one "
            "with ray start --head"
        ) from error


def _of_auto() -> str | None:
    """Return what Ray takes for ``auto``: a variable, or the last cluster of this machine."""
    if (named := environment_value("RAY_ADDRESS")) not in (None, AUTO):
        return named
    place = environment_value("RAY_TMPDIR", "TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(place, "ray", CURRENT).read_text("utf-8").strip() or None
    return None


def metrics_urls() -> list[str]:
    """Return where Prometheus finds the metrics, of each node: Ray's, Serve's and ours."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in nodes]


def _stop_ray(forks: Child | None) -> None:
    import ray

    ours = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        # Ray reports on stdout that the controller, which was asked to end, has ended.
        with contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(Exception):  # a dead cluster cannot shut down in order
                client = ServeClient.running()
                # One that does not answer would not hear that either.
                if client and CONTROLLER.fits() and drain(client, STOP_PATIENCE_S):
                    client.shut_down(STOP_PATIENCE_S)
            ours += psutil.Process().children(recursive=True)
            ray.shutdown()
    if forks is not None:
        forks.ask_to_end()
    _, alive = psutil.wait_procs(set(ours), timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def drain(client: ServeClient, timeout_s: float) -> bool:
    """Delete the applications while HAProxy is still there to hand the answers on.

    Return whether the controller answered.

    Serve's shutdown ends both at the same time. A controller that got the signal too answers
    nothing: every question here has a time limit of its own. ``serve.status()`` has none, and a
    thread that is still in it when Ray is shut down is a segmentation fault.

    Args:
        client: its controller is asked.
        timeout_s: how long the replicas may take, once the controller has answered.

    """
    ends = time.monotonic() + timeout_s

    def applications() -> list[str]:
        left_s = max(POLL_EVERY_S, min(ANSWERS_WITHIN_S, ends - time.monotonic()))
        return list(client.details(left_s)["applications"])

    # It may be slow or dead, and so may Ray: then there is nobody to wait for.
    with contextlib.suppress(Exception):
        client.delete(applications())
        while applications() and time.monotonic() < ends:
            time.sleep(POLL_EVERY_S)
        return True
    return False
