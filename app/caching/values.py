"""Rows as bytes, for a store that others can write to: they are checked, and never executed."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.caching.keys import FORMAT
from models.ensemble import Probabilities

# A row per member in the ensemble's order: (M, C) float32. Their average is computed again, which
# saves memory for other images. With an operator's own combine its result follows: (M + 1, C). If
# the cascade skipped the other members, M is 1.
Rows = Probabilities


class Outcome(NamedTuple):
    """An image's outcome: the rows of the members that answered, and why others did not."""

    rows: Rows
    missing: Mapping[str, str] = {}


MAGIC = b"TDMR"
CHECKSUM_BYTES = 16
# magic, format, rows, classes, the model set's fingerprint, checksum
VALUE_HEAD = struct.Struct(f"<4sHHI16s{CHECKSUM_BYTES}s")
VALUE = np.dtype("<f4")
MAX_VALUE = 1.001  # an operator's own combine may be off so far


class RowsFormat:
    """Packs and reads the rows of one model set: (rows, classes) float32, in 0..1.

    ``nums_rows`` are the allowed numbers of rows of an image.
    """

    def __init__(self, fingerprint: str, nums_rows: Sequence[int], num_classes: int) -> None:
        self._nums_rows, self._num_classes = nums_rows, num_classes
        self._fingerprint = fingerprint.encode("ascii").ljust(16, b"\0")

    def pack(self, key: bytes, rows: Rows) -> bytes:
        """Encode the rows of the image with this key."""
        body = rows.astype(VALUE, copy=False).tobytes()
        return VALUE_HEAD.pack(*self._start(len(rows)), _checksum(key, body)) + body

    def read(self, key: bytes, data: bytes) -> Rows | None:
        """Decode rows; None if the bytes were not packed for this key and model set."""
        body = data[VALUE_HEAD.size :]
        num_rows, rest = divmod(len(body), VALUE.itemsize * self._num_classes)
        if rest or num_rows not in self._nums_rows:
            return None
        *start, checksum = VALUE_HEAD.unpack_from(data)
        if tuple(start) != self._start(num_rows) or checksum != _checksum(key, body):
            return None
        # A copy, so that the store counts the memory that it keeps.
        rows: Rows = np.frombuffer(body, VALUE).reshape(num_rows, -1).astype(np.float32)
        # Whoever can write there can write checksums too, so the range is checked as well.
        is_sound = bool(((rows >= 0) & (rows <= MAX_VALUE)).all())  # False for NaN
        return rows if is_sound else None

    def _start(self, num_rows: int) -> tuple[object, ...]:
        return MAGIC, FORMAT, num_rows, self._num_classes, self._fingerprint


def _checksum(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES, key=key).digest()
