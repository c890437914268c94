"""Encodes calls of stages and their answers: a head in JSON, then files, images and rows.

Serve pickles arguments. For a single bytes object that is a copy; for lists, arrays and dataclasses
it is a large part of a call's cost. Every length and shape in a message is checked before use.
Errors travel by class name and arguments; only our own errors become their class again.
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
# The kind, the bytes of the head, and in answers the calls that the replica wants at a time.
PREFIX = struct.Struct("<4sII")


class MessageError(ValueError):
    """A message in another format, or from another version of the program."""


class Question(NamedTuple):
    """A request's question to a stage: files to decode, or images to classify."""

    files: Sequence[bytes]
    images: Pixels | None  # (K, H, W, 3) uint8
    left_s: float
    span: SpanIds | None  # of the request, if traced


class SharedCall(NamedTuple):
    """The parts of one call; ``is_alone`` if its only part asked for a call of its own."""

    questions: Sequence[Question]
    lane: Lane
    is_alone: bool = False


def pack_call(call: SharedCall) -> bytes:
    """Encode a call."""
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
    """Decode a call or raise :class:`MessageError`; its images are views of ``message``."""
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
    """Decode the Decoder's answer: an entry for each part; raise :class:`MessageError`."""

    def decoded(images: Any, faults: Any, decode_ms: Any, fingerprint: str) -> Decoded:
        by_place = {int(place): Fault(*fault) for place, fault in faults.items()}
        return Decoded(images, by_place, tuple(decode_ms), fingerprint)

    return _read_answers(DECODED, "u1", message, decoded)


def pack_classified(answers: Sequence[MemberAnswer | BaseException], at_once: int = 1) -> bytes:
    """Return a member's answer to a call; ``at_once`` is how many calls it wants at a time."""
    return _packed_answers(CLASSIFIED, "<f4", answers, at_once)


def read_classified(message: bytes) -> list[MemberAnswer | TandemError]:
    """Decode a member's answer: an entry for each part; raise :class:`MessageError`."""

    def classified(rows: Any, *rest: Any) -> MemberAnswer:
        queue_ms, infer_ms, batch_size, fingerprint = rest
        return MemberAnswer(rows, tuple(queue_ms), tuple(infer_ms), tuple(batch_size), fingerprint)

    return _read_answers(CLASSIFIED, "<f4", message, classified)


def calls_at_once(message: bytes) -> int:
    """Return how many calls at a time the replica wants, from an answer that was decoded before."""
    return max(1, int(PREFIX.unpack_from(message)[2]))


def named_error(error: BaseException) -> list[Any]:
    """Return the name of an error's class, and its arguments if the error is ours."""
    return [type(error).__name__, list(error.args) if isinstance(error, TandemError) else []]


def error_named(name: str, arguments: Sequence[str | float]) -> TandemError:
    """Return an error of ours by its name; other names become "the stage failed"."""
    kinds: list[type[TandemError]] = [TandemError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind(*arguments)
        kinds += kind.__subclasses__()
    return NotReadyError(f"a stage of the graph failed ({name}); try again")


def check(is_so: bool, problem: str) -> None:
    """Raise :class:`MessageError` with ``problem`` unless ``is_so``."""
    if not is_so:
        raise MessageError(problem)


def _packed_answers(
    kind: bytes, dtype: str, answers: Sequence[tuple[Any, ...] | BaseException], at_once: int
) -> bytes:
    """Encode answers: the first field of each is an array, the others are JSON."""
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
    """Yield a reader; raise :class:`MessageError` if reading fails or leaves bytes over."""
    try:
        reader = _Reader(message, kind)
        yield reader
        check(not reader.num_left, f"{reader.num_left} bytes more than the message announces")
    except MessageError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise MessageError(f"the message does not hold together: {error}") from error


class _Reader:
    """A position in a message; each read is checked against the bytes left."""

    def __init__(self, message: bytes, kind: bytes) -> None:
        self._view, self._place = memoryview(message), 0
        own_kind, num_bytes, _ = PREFIX.unpack(self.take(PREFIX.size))
        check(own_kind == kind, "this is no message of this kind, or not of this version")
        self.head: Any = json.loads(bytes(self.take(num_bytes)))

    @property
    def num_left(self) -> int:
        return len(self._view) - self._place

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes as a view."""
        is_there = 0 <= num_bytes <= self.num_left
        check(is_there, f"{num_bytes} bytes are announced and {self.num_left} are left")
        self._place += num_bytes
        return self._view[self._place - num_bytes : self._place]

    def array(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return the next numbers as a read-only view."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self.take(num_bytes), dtype).reshape(shape)
