"""What a decoding process runs: ``python -m app.decoding.worker JSON``, see :class:`Task`.

Its standard input is the socket to the Gateway. It decodes one file at a time, on one thread, and
ends when the Gateway closes the socket, or is gone. It imports neither Ray nor the settings: a
process has some 35 MB of its own and is ready after a fifth of a second.
"""

import contextlib
import dataclasses
import json
import signal
import socket
import sys
import time
from typing import NamedTuple

import cv2
import numpy as np

from app.decoding.slots import READ_BYTES, READY_SLOT, Job, Reply, Slots, jobs
from app.decoding.small import is_small
from models.image import ImageRule
from models.image_inputs import ImageInputs
from models.memory import keep_freed_memory


class Task(NamedTuple):
    """What a process is told when it starts."""

    descriptor: int  # of the shared memory
    rules: tuple[ImageRule, ...]  # the distinct inputs that it makes of a picture
    max_pixels: int
    max_full_pixels: int

    def as_argument(self) -> str:
        """Return it as one word of a command line."""
        rules = [dataclasses.asdict(rule) for rule in self.rules]
        return json.dumps([self.descriptor, rules, self.max_pixels, self.max_full_pixels])

    @classmethod
    def of_argument(cls, argument: str) -> "Task":
        """Read :meth:`as_argument`'s word."""
        descriptor, rules, max_pixels, max_full_pixels = json.loads(argument)
        made = tuple(ImageRule(**rule) for rule in rules)
        return cls(descriptor, made, max_pixels, max_full_pixels)


class Worker:
    """Decodes what the slots hold, as the Gateway itself would: the same code, the same pixels."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._inputs = ImageInputs({str(index): rule for index, rule in enumerate(task.rules)})
        self._slots = Slots(task.descriptor, self._inputs.num_bytes)

    def run(self, connection: socket.socket) -> None:
        """Answer jobs until the other end is closed."""
        self._inputs.warm_up()
        connection.sendall(Reply(READY_SLOT).pack())
        coming = jobs()
        while received := connection.recv(READ_BYTES):
            for job in coming.feed(received):
                connection.sendall(self._done(job).pack())

    def _done(self, job: Job) -> Reply:
        started = time.monotonic()
        self._slots.begin(job.slot)
        width, height = self._decoded(job)
        self._slots.end(job.slot)
        ended, cpu_s = time.monotonic(), time.process_time()
        return Reply(job.slot, width > 0, started, ended, width, height, cpu_s)

    def _decoded(self, job: Job) -> tuple[int, int]:
        """Return the picture's width and height; zeros: the Gateway finds out what is the matter.

        Whatever goes wrong here goes wrong there too, on a thread, which says it to the client.
        """
        data = self._slots.file(job.slot, job.num_bytes)
        try:
            checked = self._inputs.check(
                data, max_pixels=self._task.max_pixels, max_full_pixels=self._task.max_full_pixels
            )
            if not is_small(checked.header):
                return 0, 0
            image = self._inputs.decode(data, checked)
        except Exception:
            return 0, 0
        self._slots.image(job.slot)[:] = np.ravel(image).data
        return checked.header.width, checked.header.height


def main(argument: str) -> None:
    """Serve until the Gateway is gone; a terminal's Ctrl-C is for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)
    keep_freed_memory()
    worker = Worker(Task.of_argument(argument))
    # Its Gateway may go away while a file is decoded.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.run(socket.socket(fileno=sys.stdin.fileno()))


if __name__ == "__main__":
    main(sys.argv[1])
