"""Calls of stages, and their answers, as bytes: a head in JSON, then files, images and rows.

Serve pickles what a call is given. Of one bytes object that is a copy; of lists, arrays and
dataclasses it is much of the call's price. What a message says of itself is checked before it is
believed. Errors go by name and arguments, and only an error of ours is raised by its class again.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from app.errors import NotReadyError
from app.messages import Decoded, Fault, MemberAnswer
from app.queueing.priority import LANES, Lane
from app.tracing.parents import SpanIds
from models.errors import TandemError
from models.runtime import Pixels

A = TypeVar("A", Decoded, MemberAnswer)
CALL, DECODED, CLASSIFIED = b"TnC2", b"TnD2", b"TnM2"  # the digit is the version of the format
# The kind, the bytes of the head, and of an answer how many calls the replica wants at a time.
PREFIX = struct.Struct("<4sII")


class MessageError(ValueError):
    """A message that is none of ours, or of another version of the program."""


class Question(NamedTuple):
    """What one request asks of a stage: files, or images."""

    files: Sequence[bytes]
    images: Pixels | None  # (K, H, W, 3) uint8
    left_s: float
    span: SpanIds | None  # of the request, if it is traced


class SharedCall(NamedTuple):
    """What goes over together; ``is_alone`` if its one part asked for a call of its own."""

    questions: Sequence[Question]
    lane: Lane
    is_alone: bool = False


def pack_call(call: SharedCall) -> bytes:
    """Return a call's message."""
    parts: list[Any] = []
    blobs: list[Any] = []
    for files, images, left_s, span in call.questions:
        if images is None:
            parts.append((left_s, span, [len(file) for file in files], None))
            blobs += files
        else:
            parts.append((left_s, span, (), images.shape))
            blobs.append(np.ascontiguousarray(images))
    return _packed(CALL, (call.lane, call.is_alone, parts), blobs)


def read_call(message: bytes) -> SharedCall:
    """Return the call that a message is, or raise :class:`MessageError`; its images are views."""
    with _reading(message, CALL) as reader:
        lane, is_alone, parts = reader.head
        check(lane in LANES, f"there is no lane {lane!r}")
        questions = []
        for left_s, span, sizes, shape in parts:
            files = [bytes(reader.take(size)) for size in sizes]
            images = None if shape is None else reader.array(shape, "u1")
            questions.append(Question(files, images, left_s, span and SpanIds(*span)))
        return SharedCall(questions, lane, is_alone)


def pack_decoded(answers: Sequence[Decoded | BaseException], at_once: int = 1) -> bytes:
    """Return the Decoder's answer to a call; ``at_once`` is how many calls it wants at a time."""
    return _packed_answers(DECODED, "u1", answers, at_once)


def read_decoded(message: bytes) -> list[Decoded | TandemError]:
    """Return what each part of a call gets; raise :class:`MessageError` if it is no answer."""

    def decoded(images: Any, faults: Any, decode_ms: Any, fingerprint: str) -> Decoded:
        by_place = {int(place): Fault(*fault) for place, fault in faults.items()}
        return Decoded(images, by_place, tuple(decode_ms), fingerprint)

    return _read_answers(DECODED, "u1", message, decoded)


def pack_classified(answers: Sequence[MemberAnswer | BaseException], at_once: int = 1) -> bytes:
    """Return a member's answer to a call; ``at_once`` is how many calls it wants at a time."""
    return _packed_answers(CLASSIFIED, "<f4", answers, at_once)


def read_classified(message: bytes) -> list[MemberAnswer | TandemError]:
    """Return what each part of a call gets; raise :class:`MessageError` if it is no answer."""

    def classified(rows: Any, *rest: Any) -> MemberAnswer:
        queue_ms, infer_ms, batch_size, fingerprint = rest
        return MemberAnswer(rows, tuple(queue_ms), tuple(infer_ms), tuple(batch_size), fingerprint)

    return _read_answers(CLASSIFIED, "<f4", message, classified)


def calls_at_once(message: bytes) -> int:
    """Return how many calls at a time the replica wants, of an answer that has been read."""
    return max(1, int(PREFIX.unpack_from(message)[2]))


def named_error(error: BaseException) -> list[Any]:
    """Return the name of an error's class, and its arguments if it is one of ours."""
    return [type(error).__name__, list(error.args) if isinstance(error, TandemError) else []]


def error_named(name: str, arguments: Sequence[str | float]) -> TandemError:
    """Return an error of ours anew; any other means that the stage failed."""
    kinds: list[type[TandemError]] = [TandemError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind(*arguments)
        kinds += kind.__subclasses__()
    return NotReadyError(f"a stage of the graph failed ({name}); try again")


def check(is_so: bool, problem: str) -> None:
    """Raise :class:`MessageError` if it is not so."""
    if not is_so:
        raise MessageError(problem)


def _packed_answers(
    kind: bytes, dtype: str, answers: Sequence[tuple[Any, ...] | BaseException], at_once: int
) -> bytes:
    """Return the message of answers whose first field is an array, and all others JSON's."""
    parts: list[Any] = []
    blobs = []
    for answer in answers:
        if isinstance(answer, BaseException):
            parts.append((named_error(answer), None, ()))
        else:
            array, *fields = answer
            parts.append((None, array.shape, fields))
            blobs.append(np.ascontiguousarray(array, dtype))
    return _packed(kind, parts, blobs, at_once)


def _read_answers(
    kind: bytes, dtype: str, message: bytes, answer: Callable[..., A]
) -> list[A | TandemError]:
    with _reading(message, kind) as reader:
        return [
            error_named(*error) if error else answer(reader.array(shape, dtype), *fields)
            for error, shape, fields in reader.head
        ]


def _packed(kind: bytes, head: Any, blobs: Sequence[Any], at_once: int = 0) -> bytes:
    text = json.dumps(head, default=_fields_of).encode()
    return b"".join((PREFIX.pack(kind, len(text), at_once), text, *blobs))


def _fields_of(fault: Fault) -> tuple[Any, ...]:
    return fault.status, fault.code, fault.message


@contextmanager
def _reading(message: bytes, kind: bytes) -> Iterator["_Reader"]:
    """Yield a reader; what cannot be read, or is left over after the block, is no message."""
    try:
        reader = _Reader(message, kind)
        yield reader
        check(not reader.num_left, f"{reader.num_left} bytes more than the message announces")
    except MessageError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise MessageError(f"the message does not hold together: {error}") from error


class _Reader:
    """A place in a message; what is read is checked against what there is."""

    def __init__(self, message: bytes, kind: bytes) -> None:
        self._view, self._place = memoryview(message), 0
        own_kind, num_bytes, _ = PREFIX.unpack(self.take(PREFIX.size))
        check(own_kind == kind, "this is no message of this kind, or not of this version")
        self.head: Any = json.loads(bytes(self.take(num_bytes)))

    @property
    def num_left(self) -> int:
        return len(self._view) - self._place

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes, not copied."""
        is_there = 0 <= num_bytes <= self.num_left
        check(is_there, f"{num_bytes} bytes are announced and {self.num_left} are left")
        self._place += num_bytes
        return self._view[self._place - num_bytes : self._place]

    def array(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return the next numbers as a read-only view."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self.take(num_bytes), dtype).reshape(shape)
