"""A link between two TAP devices: delays frames, loses some, and carries so many bits a second.

``wire.py FD``: one end is open already; the other is made here, ``eth0`` of this process's network
namespace, which lives as long as the process. A line "DELAY_MS LOSS MBIT_S" of the standard input
changes the link and is answered by a byte. The input's end ends the process, so nobody can leave
one behind. Imports the standard library alone.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
FRAME_BYTES = 65536
AT_ONCE = 64  # frames read before others are sent on
WAITS_AT_MOST_S = 1.0  # for a narrow link; a queue of so long loses what comes


def tap(name: str) -> int:
    """Make a TAP device; return its end, whose closing takes the device away."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return end


class Way:
    """Frames from one end to the other, in their order."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self._sink, self._free_at = source, sink, 0.0
        self._queue: deque[tuple[float, bytes]] = deque()  # when each is due

    def take(self, delay_s: float, loss: float, bytes_s: float) -> None:
        """Read what came."""
        now = time.monotonic()
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                frame = os.read(self.source, FRAME_BYTES)
                begins = max(now, self._free_at)
                if random.random() < loss or begins - now > WAITS_AT_MOST_S:
                    continue
                self._free_at = begins + (len(frame) / bytes_s if bytes_s else 0.0)
                self._queue.append((self._free_at + delay_s, frame))

    def send(self) -> float | None:
        """Send on what is due; return the seconds to what is next, None if nothing waits."""
        while self._queue:
            if (left := self._queue[0][0] - time.monotonic()) > 0:
                return left
            with suppress(OSError):  # that end is down, or full
                os.write(self._sink, self._queue.popleft()[1])
        return None


def main(near: int) -> None:
    """Carry frames until the standard input ends."""
    far = tap("eth0")
    ways = (Way(near, far), Way(far, near))
    link = (0.0, 0.0, 0.0)
    while True:
        waits = [left for way in ways if (left := way.send()) is not None]
        ready, _, _ = select.select([0, near, far], [], [], min(waits, default=None))
        if 0 in ready:
            if not (said := os.read(0, FRAME_BYTES)):
                return
            delay_ms, loss, mbit_s = map(float, said.split())
            link = (delay_ms / 1e3, loss, mbit_s * 1e6 / 8)
            os.write(1, b"!")
        for way in ways:
            if way.source in ready:
                way.take(*link)


if __name__ == "__main__":
    main(int(sys.argv[1]))
