"""Rows as bytes for a store that others can write to: nothing in them is trusted or executed."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.caching.keys import FORMAT
from models.ensemble import Probabilities

# A row per member, in the order in which the ensemble has them: (M, C) float32. The average is made
# of them again: to keep it too would be bytes of which other images can make better use. What the
# operator's own combine made of them is kept, after them: (M + 1, C). Where the cascade skipped the
# other members there is the first one's row in place of M.
Rows = Probabilities


class Outcome(NamedTuple):
    """What an image came to: the rows of who answered, and the members that did not, with why."""

    rows: Rows
    missing: Mapping[str, str] = {}


MAGIC = b"TDMR"
CHECKSUM_BYTES = 16
# magic, format, rows, classes, the model set's fingerprint, checksum
VALUE_HEAD = struct.Struct(f"<4sHHI16s{CHECKSUM_BYTES}s")
VALUE = np.dtype("<f4")


class RowsFormat:
    """Packs and reads the rows of one model set: (rows, classes) float32, in 0..1.

    ``nums_rows``: how many rows an image may have.
    """

    def __init__(self, fingerprint: str, nums_rows: Sequence[int], num_classes: int) -> None:
        self._nums_rows, self._num_classes = nums_rows, num_classes
        self._fingerprint = fingerprint.encode("ascii").ljust(16, b"\0")

    def pack(self, key: bytes, rows: Rows) -> bytes:
        """Return the rows of the image with this key as bytes."""
        body = rows.astype(VALUE, copy=False).tobytes()
        return VALUE_HEAD.pack(*self._start(len(rows)), _checksum(key, body)) + body

    def read(self, key: bytes, data: bytes) -> Rows | None:
        """Return the rows; None if these bytes are not what was packed for this key and set."""
        body = data[VALUE_HEAD.size :]
        num_rows, rest = divmod(len(body), VALUE.itemsize * self._num_classes)
        if rest or num_rows not in self._nums_rows:
            return None
        *start, checksum = VALUE_HEAD.unpack_from(data)
        if tuple(start) != self._start(num_rows) or checksum != _checksum(key, body):
            return None
        # A copy of their own memory, which is what the store counts.
        rows: Rows = np.frombuffer(body, VALUE).reshape(num_rows, -1).astype(np.float32)
        # Whoever can write there can write a checksum; of what it guards at least the range holds.
        is_sound = bool(((rows >= 0) & (rows <= 1)).all())  # false of NaN
        return rows if is_sound else None

    def _start(self, num_rows: int) -> tuple[object, ...]:
        return MAGIC, FORMAT, num_rows, self._num_classes, self._fingerprint


def _checksum(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES, key=key).digest()
