"""Calls of a remote stage that carry the images of many requests: how they are batched and encoded.

**Batching.** A call between processes costs as much for one image as for eight. While calls are
under way, further images wait here for the next call. There is no timer: to an idle stage a single
image leaves at once, as in :mod:`app.queueing.batch_queue`. Calls have the sizes of batches. With
sizes 1, 4 and 8, of six waiting images four leave, and the other two wait for more: in a call of
six they would run as a small batch.

**Encoding.** A message is a head in JSON, then files, images or rows. Serve pickles arguments: for
a single bytes object that is a copy, for lists, arrays and dataclasses a large part of a call's
cost. Every length and shape is checked before use. Errors travel by class name and arguments; only
our own errors become their class again.
"""

import asyncio
import json
import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from app.access import ANYONE
from app.answers import Decoded, Fault, MemberAnswer
from app.errors import NotReadyError
from app.queueing.scheduler import LANES, Lane
from app.telemetry.spans import SpanIds
from models.errors import TandemError
from models.image_geometry import PictureRegion
from models.network import Pixels

StageAnswer = TypeVar("StageAnswer", Decoded, MemberAnswer)
CALL = b"TnC4"  # the digit is the version of the format
# The kind, the bytes of the head, and in answers the calls that the replica wants at a time.
PREFIX = struct.Struct("<4sII")
Q = TypeVar("Q")
PartAnswer = TypeVar("PartAnswer")
SIZES = (8,)  # of calls, in images, to a stage without batches
MAX_CALL_BYTES = 3 * 2**20  # below gRPC's default limit of 4 MiB
ALONE_BYTES = 2**20  # A larger part gets a call of its own, whose cost is small in comparison.
# A call that takes longer does not count as under way: its replica may hang, or be very busy.
HOLDS_BACK_S = 1.0


class MessageError(ValueError):
    """A message in another format, or from another version of the program."""


class Question(NamedTuple):
    """A request's question to a stage: files to decode, or images to classify."""

    files: Sequence[bytes]
    images: Pixels | None  # (K, H, W, 3) uint8
    left_s: float
    span: SpanIds | None  # of the request, if traced
    caller: tuple[str, float, bool] = (ANYONE.name, ANYONE.share, False)  # whether it has a key
    regions: Sequence[PictureRegion] = ()  # of the only file
    has_features: bool = False  # of images: whether the answer has their pooled features


class SharedCall(NamedTuple):
    """The parts of one call; ``is_alone`` if its only part asked for a call of its own."""

    questions: Sequence[Question]
    lane: Lane
    is_alone: bool = False


def pack_call(call: SharedCall) -> bytes:
    """Encode a call."""
    parts: list[Any] = []
    blobs: list[Any] = []
    for files, images, left_s, span, caller, regions, has_features in call.questions:
        if images is None:
            sizes = [len(file) for file in files]
            parts.append((left_s, span, caller, sizes, None, regions, False))
            blobs += files
        else:
            parts.append((left_s, span, caller, (), images.shape, (), has_features))
            blobs.append(np.ascontiguousarray(images))
    return _packed(CALL, (call.lane, call.is_alone, parts), blobs)


def read_call(message: bytes) -> SharedCall:
    """Decode a call or raise :class:`MessageError`; its images are views of ``message``."""
    with _reading(message, CALL) as reader:
        lane, is_alone, parts = reader.head
        check(lane in LANES, f"there is no lane {lane!r}")
        questions = []
        for left_s, span, (name, share, has_key), sizes, shape, sent, has_features in parts:
            files = [bytes(reader.take(size)) for size in sizes]
            images = None if shape is None else reader.array(shape, "u1")
            ids, caller = span and SpanIds(*span), (str(name), float(share), bool(has_key))
            regions = [PictureRegion(*numbers) for numbers in sent]
            more = regions, bool(has_features)
            questions.append(Question(files, images, left_s, ids, caller, *more))
        return SharedCall(questions, lane, is_alone)


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


class AnswerFormat(Generic[StageAnswer]):
    """A stage's answers as bytes: the first field of each is an array, the others are JSON."""

    def __init__(self, kind: bytes, dtype: str, answer: Callable[..., StageAnswer]) -> None:
        self._kind, self._dtype = kind, dtype
        self._answer: Callable[..., StageAnswer] = answer

    def pack(self, answers: Sequence[StageAnswer | BaseException], at_once: int = 1) -> bytes:
        """Encode the answer to a call; ``at_once`` is how many calls the stage wants at a time."""
        parts: list[Any] = []
        blobs = []
        for answer in answers:
            if isinstance(answer, BaseException):
                parts.append((named_error(answer), None, ()))
            else:
                array, *fields = _as_sent(answer)
                parts.append((None, array.shape, fields))
                blobs.append(np.ascontiguousarray(array, self._dtype))
        return _packed(self._kind, parts, blobs, at_once)

    def read(self, message: bytes) -> list[StageAnswer | TandemError]:
        """Decode the answer to a call: an entry for each part; raise :class:`MessageError`."""
        with _reading(message, self._kind) as reader:
            return [
                error_named(*error)
                if error
                else self._answer(reader.array(shape, self._dtype), *fields)
                for error, shape, fields in reader.head
            ]


def _decoded(images: Any, faults: Any, decode_ms: Any, fingerprint: str) -> Decoded:
    by_place = {int(place): Fault(*fault) for place, fault in faults.items()}
    return Decoded(images, by_place, tuple(decode_ms), fingerprint)


def _as_sent(answer: Decoded | MemberAnswer) -> Sequence[Any]:
    """Return the fields of an answer; a member's features follow the probabilities in its rows."""
    if isinstance(answer, Decoded) or answer.features is None:
        return answer
    num_classes = answer.probabilities.shape[1]
    rows = np.concatenate([answer.probabilities, answer.features], axis=1)
    return answer._replace(probabilities=rows, features=num_classes)


def _classified(
    rows: Any, queue: Any, infer: Any, size: Any, fingerprint: str, num_classes: int | None
) -> MemberAnswer:
    facts = tuple(queue), tuple(infer), tuple(size), fingerprint
    if num_classes is None:
        return MemberAnswer(rows, *facts)
    return MemberAnswer(rows[:, :num_classes], *facts, rows[:, num_classes:])


DECODED = AnswerFormat(b"TnD2", "u1", _decoded)  # as in CALL the digit is the format's version
CLASSIFIED = AnswerFormat(b"TnM3", "<f4", _classified)


def _packed(kind: bytes, head: Any, blobs: Sequence[Any], at_once: int = 0) -> bytes:
    text = json.dumps(head, default=attrgetter("status", "code", "message")).encode()  # a fault's
    return b"".join((PREFIX.pack(kind, len(text), at_once), text, *blobs))


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


@dataclass(slots=True, eq=False)
class Part(Generic[Q, PartAnswer]):
    """One request's part of a call; ``num_bytes`` is the larger of question and answer."""

    content: Q
    num_images: int
    num_bytes: int
    future: asyncio.Future[PartAnswer]


@dataclass(slots=True, eq=False)
class _Call(Generic[Q, PartAnswer]):
    parts: list[Part[Q, PartAnswer]]
    num_wanted: int  # parts whose callers are still waiting
    task: asyncio.Task[None] | None = None
    overdue: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _LaneState(Generic[Q, PartAnswer]):
    waiting: deque[Part[Q, PartAnswer]] = field(default_factory=deque)
    num_calls: int = 0  # under way, without those that take too long


# Makes a call, and returns the answer or error of each part, in order; raises if all parts failed.
Send = Callable[
    [Lane, Sequence[Part[Q, PartAnswer]], bool], Awaitable[Sequence[PartAnswer | BaseException]]
]


class CallBatcher(Generic[Q, PartAnswer]):
    """Makes the calls of one stage. An error of one part does not affect the other parts.

    Each call is of one lane, so that a photo does not wait for a form. A caller that goes away
    ends the call only if nobody else waits for it. All methods are called on the event loop.

    Args:
        send: makes a call; its last argument is True for a part that asked to be alone in it.
        sizes: of calls, in images, ascending; images that fill the largest leave at once.
        num_replicas: returns how many replicas the stage has now.
        context: returns the context in which a call runs, which belongs to no request.
    """

    def __init__(
        self,
        send: Send[Q, PartAnswer],
        sizes: Sequence[int] = SIZES,
        num_replicas: Callable[[], int] = lambda: 1,
        context: Callable[[], Context] = copy_context,
    ) -> None:
        self._send, self._num_replicas, self._context = send, num_replicas, context
        self._sizes = sorted(sizes)
        self.calls_per_replica = 1  # calls of each lane that a replica works on at a time
        self._lanes: dict[Lane, _LaneState[Q, PartAnswer]] = {lane: _LaneState() for lane in LANES}
        self._calls: set[_Call[Q, PartAnswer]] = set()
        self._is_scheduled = False

    def submit(
        self, content: Q, num_images: int, num_bytes: int, lane: Lane, *, is_alone: bool = False
    ) -> asyncio.Future[PartAnswer]:
        """Queue a part for the next call, and return the future of its answer.

        A large part, or a part with ``is_alone``, leaves at once in a call of its own.
        """
        future: asyncio.Future[PartAnswer] = asyncio.get_running_loop().create_future()
        part = Part(content, num_images, num_bytes, future)
        if is_alone or num_bytes > ALONE_BYTES:
            self._start(lane, [part], is_alone=True)
        else:
            self._lanes[lane].waiting.append(part)
            self._schedule()
        return future

    def _schedule(self) -> None:
        """Send waiting parts at the end of this turn of the loop, together with those it adds."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_waiting)

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        most = self.calls_per_replica * max(1, self._num_replicas())
        for lane, state in self._lanes.items():
            state.waiting = deque(part for part in state.waiting if not part.future.done())
            while parts := self._leaving(state, may_be_small=state.num_calls < most):
                self._start(lane, parts, is_alone=False)

    def _leaving(
        self, state: _LaneState[Q, PartAnswer], *, may_be_small: bool
    ) -> list[Part[Q, PartAnswer]]:
        """Remove and return the parts of the next call: the largest size that they fill."""
        waiting = state.waiting
        num_waiting = sum(part.num_images for part in waiting)
        largest = self._sizes[-1]
        if not waiting or (num_waiting < largest and not may_be_small):
            return []
        filled = (size for size in self._sizes if 1 < size <= num_waiting)
        size = max(filled, default=num_waiting)  # images that fill no size leave together
        parts = [waiting.popleft()]
        num_images, num_bytes = parts[0].num_images, parts[0].num_bytes
        while waiting and num_images < size:
            num_images += waiting[0].num_images
            num_bytes += waiting[0].num_bytes
            if num_images > largest or num_bytes > MAX_CALL_BYTES:
                break
            parts.append(waiting.popleft())
        return parts

    def _start(self, lane: Lane, parts: list[Part[Q, PartAnswer]], *, is_alone: bool) -> None:
        call = _Call(parts, len(parts))
        self._calls.add(call)
        loop = asyncio.get_running_loop()
        call.task = loop.create_task(self._make(lane, call, is_alone), context=self._context())
        if not is_alone:
            self._lanes[lane].num_calls += 1
            call.overdue = loop.call_later(HOLDS_BACK_S, self._let_others_go, lane, call)
        call.task.add_done_callback(lambda _: self._ended(lane, call))
        for part in parts:
            part.future.add_done_callback(lambda future: self._left(call, future))

    async def _make(self, lane: Lane, call: _Call[Q, PartAnswer], is_alone: bool) -> None:
        try:
            answers = await self._send(lane, call.parts, is_alone)
        except Exception as error:
            answers = [error] * len(call.parts)
        for part, answer in zip(call.parts, answers, strict=True):
            if part.future.done():  # its caller has gone
                continue
            if isinstance(answer, BaseException):
                part.future.set_exception(answer)
            else:
                part.future.set_result(answer)

    def _let_others_go(self, lane: Lane, call: _Call[Q, PartAnswer]) -> None:
        """Stop counting a call as under way, so that others can be made."""
        if call.overdue is not None:
            call.overdue.cancel()
            call.overdue = None
            self._lanes[lane].num_calls -= 1
            self._schedule()

    def _ended(self, lane: Lane, call: _Call[Q, PartAnswer]) -> None:
        self._let_others_go(lane, call)
        self._calls.discard(call)
        for part in call.parts:  # still waiting, if the call's task was cancelled
            part.future.cancel()

    def _left(self, call: _Call[Q, PartAnswer], future: asyncio.Future[PartAnswer]) -> None:
        """Cancel a call once nobody waits for it."""
        if future.cancelled():
            call.num_wanted -= 1
            if not call.num_wanted and call.task is not None:
                call.task.cancel()
