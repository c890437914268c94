"""The load balancer of configs/haproxy before the nodes of a cluster, and where it sends to."""

import csv
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import ROOT

from app.launch.haproxy import haproxy_binary
from tests.support.services.network import Place

CONFIG = ROOT / "configs" / "haproxy" / "haproxy.cfg"
EVERY_S = 0.1


class Balancer:
    """It runs at ``place``; ``servers`` are host:port by name."""

    def __init__(self, place: Place, folder: Path, servers: Mapping[str, str]) -> None:
        self.url, self._socket = f"http://{place.address}:8000", folder / "balancer.sock"
        lines = CONFIG.read_text("ascii").splitlines()
        own = [line.split() for line in lines if line.startswith("    server ")]
        options = " ".join(own[0][3:])
        lines = [line for line in lines if line.split() not in own]
        lines.insert(lines.index("global") + 1, f"    stats socket {self._socket}")
        lines += [f"    server {name} {address} {options}" for name, address in servers.items()]
        (file := folder / "balancer.cfg").write_text("\n".join(lines) + "\n", "ascii")
        command = [*place.prefix, str(haproxy_binary()), "-db", "-f", str(file)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._is_over = threading.Event()
        self._sent: dict[str, list[tuple[float, int]]] = {}  # by server: when, and how many so far
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def last_sent(self, server: str) -> float:
        """Return when a request last went to the server, by ``time.monotonic``."""
        return self._sent[server][-1][0]

    def num_sent(self, server: str, since: float) -> int:
        """Return how many requests went to the server after a time, tries included."""
        before = [number for at, number in self._sent[server] if at < since]
        return self._sent[server][-1][1] - max(before, default=0)

    def _watch(self) -> None:
        while not self._is_over.wait(EVERY_S):
            with suppress(OSError):  # it has not started
                for row in self._rows():
                    number, name = int(row["lbtot"] or 0), row["svname"]
                    sent = self._sent.setdefault(name, [])
                    if not sent or sent[-1][1] != number:
                        sent.append((time.monotonic(), number))

    def _rows(self) -> list[dict[str, Any]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._socket))
            connection.sendall(b"show stat nodes 4 -1\n")
            said = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return list(csv.DictReader(said.removeprefix("# ").splitlines()))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()
