"""Nodes in network namespaces of their own, whose links can be cut.

Needs root, and iproute2 and util-linux, which every Linux has. All of it is inside a namespace that
the script enters first, so nothing of it is seen outside or left behind.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

INSIDE = "TANDEM_LOAD_NETWORK"  # set in the namespace that has the bridge
BRIDGE, SUBNET = "tandem", "10.213.0"
TOOLS = ("unshare", "nsenter", "ip")
# What is needed, in a namespace that is gone at once: a container's root may lack the rights.
TRIAL = """
ip link set lo up
ip link add name trial type bridge
unshare --net sleep 5 &
sleep 0.2
ip link add name node type veth peer name eth0 netns $!
nsenter --net=/proc/$!/ns/net ip link set eth0 up
kill $!
"""


def why_not() -> str | None:
    """Return why this machine or user cannot have such a network; None if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    command = ["unshare", "--net", "sh", "-ec", TRIAL]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def enter() -> None:
    """Start this script again in a namespace of its own, or go on if it is there."""
    if INSIDE in os.environ:
        return
    os.environ[INSIDE] = "1"
    sys.stdout.flush()
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])


@dataclass
class Place:
    """Where a node lives: an address, and what goes before its command."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    interface: str = ""
    holder: subprocess.Popen[bytes] | None = None  # keeps the namespace

    def set_link(self, *, is_up: bool) -> None:
        """Plug the cable in, or pull it out."""
        _ip("link", "set", self.interface, "up" if is_up else "down")

    def leave(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()


class Network:
    """A bridge, to which this process is connected at .1, and places on it."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "name", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self.here = Place(f"{SUBNET}.1")

    def add(self) -> Place:
        """Return a new place with an address and a link of its own."""
        number = len(self._places) + 2
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], start_new_session=True)
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            time.sleep(0.01)  # it has not entered its namespace
        prefix = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        place = Place(f"{SUBNET}.{number}", prefix, f"node{number}", holder)
        self._places.append(place)
        pair = ("type", "veth", "peer", "name", "eth0", "netns", f"{holder.pid}")
        _ip("link", "add", "name", place.interface, *pair)
        _ip("addr", "add", f"{place.address}/24", "dev", "eth0", prefix=prefix)
        for interface in ("lo", "eth0"):
            _ip("link", "set", interface, "up", prefix=prefix)
        _ip("link", "set", place.interface, "master", BRIDGE, "up")
        return place

    def stop(self) -> None:
        for place in self._places:
            place.leave()


def _ip(*arguments: str, prefix: tuple[str, ...] = ()) -> None:
    subprocess.run([*prefix, "ip", *arguments], check=True)
