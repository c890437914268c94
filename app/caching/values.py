"""Rows as bytes for a store that others can write to: nothing in them is trusted or executed."""

import hashlib
import struct

import numpy as np

from app.caching.keys import FORMAT
from models.ensemble import Probabilities

# A row per member, in the order in which the ensemble has them: (M, C) float32. The average is made
# of them again: to keep it too would be bytes of which other images can make better use. What the
# operator's own combine made of them is kept, after them: (M + 1, C).
Rows = Probabilities


MAGIC = b"TDMR"
CHECKSUM_BYTES = 16
# magic, format, members, classes, the model set's fingerprint, checksum
VALUE_HEAD = struct.Struct(f"<4sHHI16s{CHECKSUM_BYTES}s")
VALUE = np.dtype("<f4")


class RowsFormat:
    """Packs and reads the rows of one model set: (rows, classes) float32, in 0..1."""

    def __init__(self, fingerprint: str, num_rows: int, num_classes: int) -> None:
        self._shape = (num_rows, num_classes)
        self._start = (MAGIC, FORMAT, *self._shape, fingerprint.encode("ascii").ljust(16, b"\0"))
        self.num_bytes = VALUE_HEAD.size + VALUE.itemsize * num_rows * num_classes

    def pack(self, key: bytes, rows: Rows) -> bytes:
        """Return the rows of the image with this key as bytes."""
        body = rows.astype(VALUE, copy=False).tobytes()
        return VALUE_HEAD.pack(*self._start, _checksum(key, body)) + body

    def read(self, key: bytes, data: bytes) -> Rows | None:
        """Return the rows; None if these bytes are not what was packed for this key and set."""
        if len(data) != self.num_bytes:
            return None
        *start, checksum = VALUE_HEAD.unpack_from(data)
        body = data[VALUE_HEAD.size :]
        if tuple(start) != self._start or checksum != _checksum(key, body):
            return None
        # A copy of their own memory, which is what the store counts.
        rows: Rows = np.frombuffer(body, VALUE).reshape(self._shape).astype(np.float32)
        # Whoever can write there can write a checksum; of what it guards at least the range holds.
        is_sound = bool(((rows >= 0) & (rows <= 1)).all())  # false of NaN
        return rows if is_sound else None


def _checksum(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES, key=key).digest()
