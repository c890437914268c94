"""The memory that a Gateway and a decoding process share, and the messages between them.

The memory is cut into slots. The Gateway writes a file into one that is free and sends a
:class:`Job`; the process writes the image behind the file and sends a :class:`Reply`. While it
works on a slot the first byte of it says so, and still does when the process has died: whoever
finds it knows which file it died of. Messages have a fixed size, and follow each other on a stream;
numbers are in the machine's own byte order.
"""

import mmap
import struct
from typing import Generic, NamedTuple, TypeVar

from app.decoding.small import SMALL_BYTES

NUM_SLOTS = 128  # as many as requests may be under way by default
_HEAD_BYTES = 64  # a cache line: the flag, and nothing else
_PAGE = mmap.PAGESIZE
_JOB, _REPLY = struct.Struct("=II"), struct.Struct("=I?ddIId")
READY_SLOT = NUM_SLOTS  # of a process's first reply, which answers nothing
READ_BYTES = 4096  # at a time: many messages


class Job(NamedTuple):
    """A file to decode."""

    slot: int
    num_bytes: int

    def pack(self) -> bytes:
        """Return the message."""
        return _JOB.pack(*self)


class Reply(NamedTuple):
    """What became of a file; times are by ``time.monotonic``, which processes share on Linux."""

    slot: int
    is_decoded: bool = False  # False: it is no small photo, or bad, or this process cannot
    started: float = 0.0
    ended: float = 0.0
    width: int = 0  # of the picture as stored
    height: int = 0
    cpu_s: float = 0.0  # that the process has taken so far

    def pack(self) -> bytes:
        """Return the message."""
        return _REPLY.pack(*self)


M = TypeVar("M", Job, Reply)


class Messages(Generic[M]):
    """Takes messages of one kind out of what comes on a stream, which may cut them anywhere."""

    def __init__(self, kind: type[M], layout: struct.Struct) -> None:
        self._kind: type[M] = kind
        self._layout = layout
        self._rest = b""

    def feed(self, received: bytes) -> list[M]:
        """Return the messages that are whole now."""
        received = self._rest + received if self._rest else received
        whole = len(received) // self._layout.size * self._layout.size
        self._rest = received[whole:]
        return [self._kind(*one) for one in self._layout.iter_unpack(received[:whole])]


def jobs() -> Messages[Job]:
    """Return what takes jobs out of a stream."""
    return Messages(Job, _JOB)


def replies() -> Messages[Reply]:
    """Return what takes replies out of a stream."""
    return Messages(Reply, _REPLY)


def slot_bytes(image_bytes: int) -> int:
    """Return how large a slot is whose image has ``image_bytes``: whole pages."""
    return -(-(_HEAD_BYTES + SMALL_BYTES + image_bytes) // _PAGE) * _PAGE


class Slots:
    """The shared memory of one process, :data:`NUM_SLOTS` slots; pages cost once they are used.

    Args:
        descriptor: of the memory (``os.memfd_create``), which stays the caller's.
        image_bytes: of a decoded image.

    """

    def __init__(self, descriptor: int, image_bytes: int) -> None:
        self._bytes_each, self._image_bytes = slot_bytes(image_bytes), image_bytes
        self._memory = memoryview(mmap.mmap(descriptor, NUM_SLOTS * self._bytes_each))

    def put_file(self, slot: int, data: bytes) -> None:
        """Write a file, of at most :data:`SMALL_BYTES`, into a slot that nobody works on."""
        at = slot * self._bytes_each
        self._memory[at] = False
        self._memory[at + _HEAD_BYTES : at + _HEAD_BYTES + len(data)] = data

    def file(self, slot: int, num_bytes: int) -> memoryview:
        """Return a slot's file, not copied, as long as the slot is not used again."""
        at = slot * self._bytes_each + _HEAD_BYTES
        return self._memory[at : at + num_bytes]

    def image(self, slot: int) -> memoryview:
        """Return where a slot's image is, not copied."""
        at = slot * self._bytes_each + _HEAD_BYTES + SMALL_BYTES
        return self._memory[at : at + self._image_bytes]

    def begin(self, slot: int) -> None:
        """Note that a slot is worked on."""
        self._memory[slot * self._bytes_each] = True

    def end(self, slot: int) -> None:
        """Note that it is not, any more."""
        self._memory[slot * self._bytes_each] = False

    def has_begun(self, slot: int) -> bool:
        """Whether a slot is worked on, or was when the process died."""
        return bool(self._memory[slot * self._bytes_each])
