"""Reads a message's fields one after the other, and never beyond its end."""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt


class MessageError(ValueError):
    """A message that is none of ours, or of another version of the program."""


class MessageReader:
    """A place in a message; what is read is checked against what there is."""

    def __init__(self, message: bytes) -> None:
        self._view, self._place = memoryview(message), 0

    @property
    def num_left(self) -> int:
        """How many bytes are left."""
        return len(self._view) - self._place

    def view(self, num_bytes: int) -> memoryview:
        """Return the next bytes, not copied."""
        if num_bytes > self.num_left:
            raise MessageError(f"{num_bytes} bytes are announced and {self.num_left} are left")
        self._place += num_bytes
        return self._view[self._place - num_bytes : self._place]

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next fields."""
        return layout.unpack(self.view(layout.size))

    def array(self, dtype: str, num_items: int) -> npt.NDArray[Any]:
        """Return the next numbers as a read-only view."""
        return np.frombuffer(self.view(num_items * np.dtype(dtype).itemsize), dtype)

    def end(self) -> None:
        """Check that nothing is left."""
        if self.num_left:
            raise MessageError(f"{self.num_left} bytes more than the message announces")


def check(is_so: bool, problem: str) -> None:
    """Raise :class:`MessageError` if it is not so."""
    if not is_so:
        raise MessageError(problem)
