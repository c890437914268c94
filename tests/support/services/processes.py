"""Looking at a service from outside: its processes, their memory, what it leaves behind."""

import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from app.launch.forks import SERVER_MODULE

EVENTUALLY_S = 300  # for what takes seconds, on a machine that others keep busy
RUN_FOLDER = "RAY_SERVE_HAPROXY_SERVER_STATE_BASE"  # a variable of all that one run starts


def descendants(pid: int) -> set[psutil.Process]:
    """Return everything that ``pid`` started, itself included."""
    root = psutil.Process(pid)
    return {root, *root.children(recursive=True)}


def replicas(pid: int) -> dict[str, int]:
    """Return the pid of each deployment's replica."""
    found = {}
    for process in descendants(pid):
        kind, _, name = title(process).partition(":tandem:")
        if kind == "ray::ServeReplica":
            found[name.split(".")[0].strip()] = process.pid  # titles are padded
    return found


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended while we looked
        return ""


def raylet(pid: int) -> psutil.Process:
    """Return the raylet below ``pid``. Other processes may end while this looks."""
    (raylet,) = (p for p in descendants(pid) if title(p).partition(" ")[0].endswith("/raylet"))
    return raylet


def fork_server(pid: int) -> psutil.Process:
    """Return the process below ``pid`` of which Ray's Python processes are forks."""
    return next(p for p in descendants(pid) if SERVER_MODULE in title(p))


def memory_bytes(pid: int) -> int:
    """Return the tree's memory; PSS counts a page that several processes share once."""
    total = 0
    for process in descendants(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def run_folder(pid: int) -> Path:
    """Return the folder of this run alone, which what it started has in the environment."""
    for process in descendants(pid) - {psutil.Process(pid)}:
        try:
            return Path(process.environ()[RUN_FOLDER])
        except (psutil.Error, KeyError):
            continue
    raise LookupError(f"{pid} has started nothing yet")


def serve_logs(pid: int) -> Path:
    """Return the folder of the logs that Serve's processes below ``pid`` write."""
    for process in descendants(pid):
        if found := re.search(r"--log_dir=(\S+)", title(process)):
            return Path(found[1]) / "serve"
    raise LookupError(f"no raylet below {pid}")


def still_running(processes: Iterable[psutil.Process], within_s: float = 5) -> list[str]:
    """Return those that do not end; a process id that was given away again does not count."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    return [f"{process.pid} {title(process)}" for process in alive if process.is_running()]


def listening(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the TCP ports that the processes listen on."""
    ports = set()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


def reachable_ports(pid: int) -> set[tuple[str, str, int]]:
    """Return what other machines reach of what ``pid`` started."""
    reachable = set()
    for process in descendants(pid):
        try:
            name, connections = process.name(), process.net_connections("tcp")
        except psutil.Error:
            continue
        reachable |= {
            (name, c.laddr.ip, c.laddr.port)
            for c in connections
            if c.status == psutil.CONN_LISTEN and not _is_loopback(c.laddr.ip)
        }
    return reachable


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def still_listening(ports: set[int], folder: Path) -> set[int]:
    """Return those of ``ports`` that are listened on by what belongs to the run of ``folder``.

    A port that was let go may be another's at once: any Ray on this machine takes the free ones.
    """
    connections = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {c.laddr.port for c in connections if c.laddr.port in ports and _is_of(c.pid, folder)}


def _is_of(pid: int | None, folder: Path) -> bool:
    """Whether a process has this run's folder in its environment; if nobody can tell, it has."""
    try:
        return psutil.Process(pid).environ().get(RUN_FOLDER) == str(folder) if pid else True
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def wait_until(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.1)  # a poll against a deadline


def mapped_runtimes(pid: int) -> set[str]:
    """Return which of torch and ONNX Runtime a process and its descendants have mapped."""
    mapped: set[str] = set()
    for process in descendants(pid):
        try:
            paths = [each.path for each in process.memory_maps()]
        except psutil.Error:  # it ended while we looked
            continue
        mapped |= {r for r in ("torch", "onnxruntime") if any(f"/{r}/" in path for path in paths)}
    return mapped
