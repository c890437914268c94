"""A decoding process that runs, with the socket and the memory that go with it."""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from app.decoding.slots import NUM_SLOTS, Slots, replies, slot_bytes
from app.decoding.worker import Task
from app.environment import decoding_environment

PACKAGES = Path(__file__).resolve().parents[2]  # the folder that app and models are in
END_WITHIN_S = 2.0


class Child:
    """Started when it is made, ready a moment later, ended by :meth:`end` or with this process.

    Raises:
        OSError: there is no memory, or no process more.

    """

    def __init__(self, task: Task, image_bytes: int) -> None:
        self.is_ready = False
        self.unsent: list[bytes] = []  # jobs of this turn of the loop
        self.replies = replies()
        self.connection, its_end = socket.socketpair()
        memory = os.memfd_create("tandem-photos")
        try:
            os.ftruncate(memory, NUM_SLOTS * slot_bytes(image_bytes))
            self.slots = Slots(memory, image_bytes)
            argument = task._replace(descriptor=memory).as_argument()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.decoding.worker", argument],
                stdin=its_end.fileno(),
                pass_fds=(memory,),
                cwd=PACKAGES,
                env=decoding_environment(),
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            its_end.close()
            os.close(memory)
        self.connection.setblocking(False)
        self.end = weakref.finalize(self, _end, self.connection, self.process)

    def send(self) -> None:
        """Send the jobs of a turn of the loop together: to wake the process costs more than one."""
        message, self.unsent = b"".join(self.unsent), []
        with contextlib.suppress(OSError):  # it is gone, which the loop is about to read
            self.connection.send(message)


def _end(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Close the socket, at which it ends, and wait for it."""
    connection.close()
    try:
        process.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
