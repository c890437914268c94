"""What clients see when a process of one machine's service dies: ``python tests/load/kills.py``.

Each row kills (kill -9) or stops (SIGSTOP) one process of a service with the bundled set in its
default configuration, while small requests come in. Every answer is compared with what the
networks say. ``--on serve-run`` does it to Ray's ``serve run serve_config.yaml`` in place of
``tandem serve``. Where the command ends by itself, the row says with which status and what is left;
the next row starts it again on the same port. The result goes to tests/load/results/kills.json.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from checked_load import CheckedLoad, summary
from drawn_classes import SIDE, draw
from machine import ROOT, describe, write_result

from app.launch.checks import free_port
from app.launch.forks import SERVER_MODULE
from tests.support.services.live_service import Service
from tests.support.services.processes import descendants, still_running, title

BURST, EVERY_S = 3, 0.5
BEFORE_S, CALM_S = 2.0, 8.0  # of load: before the fault, and of right answers after it
# Ray notices the end of its own processes after 61 to 85 s if nobody else does.
ENDS_WITHIN_S, WATCHED_S = 110.0, 120.0
PHOTOS = {"11 KB": 105, "111 KB": 348, "401 KB": 671}  # sides in px of noise that has this size
RESULT = ROOT / "tests" / "load" / "results" / "kills.json"


class Host(StrEnum):
    """Which command serves."""

    TANDEM = "tandem-serve"
    SERVE_RUN = "serve-run"


@dataclass(frozen=True)
class Kill:
    """A process by a part of its command line; the rest is how it ends and who looks on."""

    told: str
    part: str
    number: signal.Signals = signal.SIGKILL
    is_kept: bool = False  # the clients' connections
    side: int = SIDE  # of the photos
    may_end: bool = False  # the command, with it
    hosts: tuple[Host, ...] = tuple(Host)


GATEWAY = "ray::ServeReplica:tandem:Gateway"
KILLS = {
    "gateway": Kill("Gateway, new connections", GATEWAY),
    **{
        f"gateway-kept-{size.removesuffix(' KB')}": Kill(
            f"Gateway, kept connections, photos of {size}", GATEWAY, is_kept=True, side=side
        )
        for size, side in PHOTOS.items()
    },
    "gateway-stopped": Kill("Gateway stopped (SIGSTOP)", GATEWAY, signal.SIGSTOP),
    "controller": Kill("controller", "ray::ServeController"),
    "proxy": Kill("ProxyActor", "ray::ProxyActor"),
    "haproxy": Kill("HAProxy", "haproxy -db", hosts=(Host.TANDEM,)),
    "haproxy-manager": Kill("HAProxyManager", "ray::HAProxyManager", hosts=(Host.TANDEM,)),
    "agent": Kill("DashboardAgent", "DashboardAgent", may_end=True),
    "forks": Kill("fork server", SERVER_MODULE, may_end=True, hosts=(Host.TANDEM,)),
    "raylet": Kill("raylet", "/raylet ", may_end=True),
    "gcs": Kill("gcs_server", "/gcs_server ", may_end=True),
    "command": Kill("the command itself", "", may_end=True),
}
# serve run starts Ray's agent as a script.
SCRIPTS = {"DashboardAgent": "dashboard/agent.py"}


def main(
    kill: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KILLS)}; else all")] = None,
    on: Annotated[list[Host] | None, typer.Option(help="which command serves; else both")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Kill one process after the other of a service of our own; count what clients lose."""
    if unknown := set(kill or ()) - set(KILLS):
        raise SystemExit(f"no such process: {', '.join(unknown)}; there are {', '.join(KILLS)}")
    # Told to end (timeout does), it must not leave its service behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rows: dict[str, dict[str, Any]] = {}
    for host in on or list(Host):
        names = [name for name in kill or KILLS if host in KILLS[name].hosts]
        rows[host] = dict(struck_in_turn(host, names))
    write_result({**describe(), "kills": rows}, json_file)


def struck_in_turn(host: Host, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Strike each in turn; a service that ended is started again, on the same port."""
    port, service = free_port(), None
    model_set = ROOT / "models" / "imagenette"
    with tempfile.TemporaryDirectory("", "tk-", "/tmp", ignore_cleanup_errors=True) as folder:
        try:
            for name in names:
                if service is None or service.process.poll() is not None:
                    service = started(host, port, Path(folder))
                pictures = draw(model_set, 8, KILLS[name].side)
                row = strike(service, KILLS[name], host, pictures)
                typer.echo(f"{host} {name}: {row}", err=True)
                yield name, row
                # The next row wants one that is whole. With Ray's agent its raylet ends.
                if row["recovered_after_s"] is None or KILLS[name].may_end:
                    end(service)
        finally:
            if service is not None:
                end(service)


def started(host: Host, port: int, folder: Path) -> Service:
    """Start the service and return it when it answers."""
    log = folder / "log.txt"
    if host is Host.TANDEM:
        service = Service(port, "--metrics-port", str(free_port()), log=log, temp=folder)
    else:
        config = folder / "serve_config.yaml"
        text = (ROOT / "serve_config.yaml").read_text("utf-8")
        config.write_text(text.replace("port: 8000\n", f"port: {port}\n"), "utf-8")
        serve = str(Path(sys.executable).with_name("serve"))
        command = [serve, "run", str(config), "--address", "local"]
        temp = {"TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        service = Service(port, log=log, command=command, environment=os.environ | temp)
    service.wait_answering()
    return service


def strike(service: Service, kill: Kill, host: Host, pictures: list[Any]) -> dict[str, Any]:
    """Kill under load; return what clients saw, and what became of the command."""
    root, family = service.process, descendants(service.process.pid)
    victims = [psutil.Process(root.pid)] if not kill.part else found(family, kill.part, host)
    with CheckedLoad(service.url, pictures, BURST, EVERY_S, is_kept=kill.is_kept) as load:
        time.sleep(BEFORE_S)
        load.wait_under_way(BURST)
        at = time.monotonic()
        victims[-1].send_signal(kill.number)  # of two, the last one started serves
        watched = ENDS_WITHIN_S if kill.may_end else WATCHED_S
        while time.monotonic() < at + watched and root.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= descendants(root.pid)
            # What may take the command along is watched until Ray itself would have noticed.
            if time.monotonic() > at + CALM_S + 1 and is_calm(load) and not kill.may_end:
                break
            time.sleep(0.2)
        ended_after_s = None if root.poll() is None else round(time.monotonic() - at, 1)
        is_well = is_calm(load)
    figures = summary(load, at, at)
    failing_s = figures.pop("failing_for_s")
    row = {"killed": kill.told, **figures, "failing_for_s": failing_s}
    row["recovered_after_s"] = failing_s if is_well and ended_after_s is None else None
    row |= {"command_ended_after_s": ended_after_s, "exit_code": root.poll()}
    with contextlib.suppress(psutil.NoSuchProcess):
        victims[-1].resume()
    if ended_after_s is not None:
        left = still_running(family, within_s=3)
        names = (what.split(" ", 1)[1].split(" ")[0] for what in left)
        row["left_3_s_later"] = sorted(Path(name).name for name in names)
        row["said"] = last_line(service.log) if kill.part and host is Host.TANDEM else ""
        for process in family if host is Host.SERVE_RUN else ():  # ours clears up by itself
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return row


def last_line(log: Path) -> str:
    """Return the message of the log's last line, without the places of this run."""
    message = json.loads(log.read_text("utf-8").splitlines()[-1])["message"]
    return str(message).partition("; ")[0]


def is_calm(load: CheckedLoad) -> bool:
    """Whether all that ended of late was right, and within a second."""
    late = [o for o in load.outcomes if o.ended > time.monotonic() - CALM_S]
    return bool(late) and all(o.kind == "right" and o.ended - o.sent < 1 for o in late)


def found(family: set[psutil.Process], part: str, host: Host) -> list[psutil.Process]:
    wanted = SCRIPTS.get(part, part) if host is Host.SERVE_RUN else part
    victims = [process for process in family if wanted in title(process)]
    if not victims:
        raise SystemExit(f"there is no {wanted} to kill")
    return sorted(victims, key=psutil.Process.create_time)


def end(service: Service) -> None:
    """Stop it, and what it leaves behind, by pid."""
    family = descendants(service.process.pid) if service.process.poll() is None else set()
    with contextlib.suppress(subprocess.TimeoutExpired):  # serve run may wait for what was killed
        service.stop()
    for process in psutil.wait_procs(list(family), timeout=5)[1]:
        process.kill()
    service.process.wait(10)


if __name__ == "__main__":
    typer.run(main)
