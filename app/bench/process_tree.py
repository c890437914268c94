"""CPU time of a service's whole process tree on this machine, Ray and HAProxy included."""

from urllib.parse import urlsplit

import psutil

PORTS = {"http": 80, "https": 443}  # of URLs that name none
LOCAL = {"127.0.0.1", "localhost", "::1"}
REPLICA = "ray::ServeReplica:"  # the title of a replica's process: ray::ServeReplica:tandem:Decoder


def service_root(url: str) -> psutil.Process | None:
    """Return the root process of the service, ``tandem serve``, if it runs on this machine.

    It is an ancestor of the process that listens on the port. None if the service runs elsewhere,
    or was started in another way.
    """
    parts = urlsplit(url)
    if parts.hostname not in LOCAL:
        return None
    port = parts.port or PORTS.get(parts.scheme)
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status != psutil.CONN_LISTEN or not address or not connection.pid:
                continue
            if address.port == port:
                return _root_of(psutil.Process(connection.pid))
    except psutil.Error:
        return None
    return None


def _root_of(process: psutil.Process) -> psutil.Process | None:
    for ancestor in (process, *process.parents()):
        words = ancestor.cmdline()
        if any(word.endswith("tandem") for word in words) and "serve" in words:
            return ancestor
    return None


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Return the CPU time so far, user and system, of ``root`` and its descendants, by stage.

    It is empty if ``root`` has ended.
    """
    try:
        processes = (root, *root.children(recursive=True))
    except psutil.Error:
        return {}
    total: dict[str, float] = {}
    for process in processes:
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        stage = stage_of(words)
        total[stage] = total.get(stage, 0.0) + times.user + times.system
    return total


def stage_of(command_line: list[str]) -> str:
    """Return the deployment of a replica's process, HAProxy, or "Ray" for the rest."""
    first = command_line[0] if command_line else ""
    if first.startswith(REPLICA):  # while a method runs, its name follows the deployment's
        return first.rsplit(":", 1)[-1].partition(".")[0]
    return "HAProxy" if first.rsplit("/", 1)[-1] == "haproxy" else "Ray"
