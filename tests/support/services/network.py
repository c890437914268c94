"""Nodes in network namespaces of their own, whose links can be cut, slow, narrow or lose frames.

Needs root, /dev/net/tun, and iproute2 and util-linux, which every Linux has. All of it is inside a
namespace that the script enters first, so nothing of it is seen outside or left behind. A link is a
process (wire.py) between two TAP devices: kernels without ``tc netem`` are common (decision 0091).
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.services.wire import tap

INSIDE = "TANDEM_LOAD_NETWORK"  # set in the namespace that has the bridge, to the one outside
BRIDGE, SUBNET = "tandem", "10.213.0"
TOOLS = ("unshare", "nsenter", "ip")
WIRE = Path(__file__).with_name("wire.py")
# What is needed, in a namespace that is gone at once: a container's root may lack the rights.
TRIAL = """
ip link set lo up
ip link add name trial type bridge
ip tuntap add dev node mode tap
unshare --net ip tuntap add dev eth0 mode tap
"""
ANSWERS_WITHIN_S = 20.0


def why_not() -> str | None:
    """Return why this machine or user cannot have such a network; None if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "sh", "-ec", TRIAL], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def enter() -> None:
    """Start this script again in a namespace of its own, or go on if it is there."""
    if INSIDE in os.environ:
        return
    os.environ[INSIDE] = str(Path("/proc/self/ns/net").stat().st_ino)
    sys.stdout.flush()
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.orig_argv[1:]])


@dataclass
class Place:
    """Where a node lives: an address, and what goes before its command."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    wire: subprocess.Popen[bytes] | None = None  # its link, which keeps the namespace
    delay_ms: float = 0.0

    def shape(self, *, delay_ms: float = 0.0, loss: float = 0.0, mbit_s: float = 0.0) -> None:
        """Make the link so, both ways.

        Args:
            delay_ms: of each way.
            loss: share of the frames, 0 to 1.
            mbit_s: 10^6 bits/s of each way; 0: no limit. What waits over 1 s for it is lost.

        """
        self.delay_ms = delay_ms
        self._tell(f"{delay_ms} {loss} {mbit_s}\n".encode())

    def set_link(self, *, is_up: bool) -> None:
        """Let every frame get lost, or none; the link's ends do not see it."""
        self.shape(delay_ms=self.delay_ms, loss=0.0 if is_up else 1.0)

    def leave(self) -> None:
        """End the link, and whatever else runs in the namespace."""
        if self.wire is not None:
            _end_all_in(f"/proc/{self.wire.pid}/ns/net")
            with self.wire:  # closes the pipes and waits
                self.wire.kill()

    def _tell(self, line: bytes) -> None:
        """Send a line to the link's process, and wait until it has taken it."""
        wire = self.wire
        assert wire is not None
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.write(line)
        if not select.select([wire.stdout], [], [], ANSWERS_WITHIN_S)[0] or not wire.stdout.read(1):
            raise RuntimeError(f"the link of {self.address} did not answer")


class Network:
    """A bridge, to which this process is connected at .1, and places on it.

    Leaving it, or the end of this process in any way, ends the links.
    """

    def __init__(self, delay_ms: float = 0.0) -> None:
        self._places: list[Place] = []
        self._delay_ms = delay_ms  # of a new link
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "name", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self.here = Place(f"{SUBNET}.1")

    def add(self) -> Place:
        """Return a new place with an address and a link of its own."""
        number = len(self._places) + 2
        near = tap(f"node{number}")
        wire = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-IS", WIRE, str(near)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(near,),
            start_new_session=True,
        )
        os.close(near)
        prefix = ("nsenter", f"--net=/proc/{wire.pid}/ns/net")
        place = Place(f"{SUBNET}.{number}", prefix, wire)
        self._places.append(place)
        place.shape(delay_ms=self._delay_ms)
        _ip("addr", "add", f"{place.address}/24", "dev", "eth0", prefix=prefix)
        for interface in ("lo", "eth0"):
            _ip("link", "set", interface, "up", prefix=prefix)
        _ip("link", "set", f"node{number}", "master", BRIDGE, "up")
        return place

    def stop(self) -> None:
        """End every link and all that runs on the network, orphans of a killed parent too."""
        for place in self._places:
            place.leave()
        _end_all_in("/proc/self/ns/net")


def _end_all_in(namespace: str) -> None:
    """Kill the processes of a network namespace, this one excepted; never the machine's own."""
    there = Path(namespace).stat().st_ino
    if there == int(os.environ[INSIDE]):
        return
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if (process / "ns/net").stat().st_ino == there and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


def _ip(*arguments: str, prefix: tuple[str, ...] = ()) -> None:
    subprocess.run([*prefix, "ip", *arguments], check=True)
