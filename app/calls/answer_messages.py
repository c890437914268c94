"""The answer to a call of many images as bytes: a head, rows by part, numbers, images, notes.

What is not an array is rare: the errors of parts and the faults of files. It goes as JSON, by an
error's name and arguments, and only an error of ours is raised by its class again.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from app.calls.message_reader import MessageError, MessageReader, check
from app.errors import NotReadyError
from app.messages import Decoded, Fault, MemberAnswer
from models.errors import TandemError

DECODED, CLASSIFIED = b"TnD1", b"TnM1"  # the digit is the version of the format
# kind, calls at once, parts, rows, two sizes of a row, bytes of the notes and of the fingerprint
ANSWER_HEAD = struct.Struct("<4sIIIIIII")
NUM_TIMES = {DECODED: 1, CLASSIFIED: 3}  # numbers that each row has beside its own
Notes = dict[str, dict[str, Any]]


class _Answer(NamedTuple):
    """A message, taken apart."""

    num_rows: list[int]  # by part
    times: npt.NDArray[np.float32]  # (numbers, rows)
    rows: npt.NDArray[Any]
    notes: Notes
    fingerprint: str

    def errors(self) -> list[TandemError | None]:
        """Return each part's error; None if it was answered."""
        found = self.notes["errors"]
        return [
            error_named(*found[str(i)]) if str(i) in found else None for i in range(self.num_parts)
        ]

    @property
    def num_parts(self) -> int:
        return len(self.num_rows)

    def ranges(self) -> Iterator[slice]:
        """Return where each part's rows are."""
        first = 0
        for count in self.num_rows:
            yield slice(first, first + count)
            first += count


def pack_decoded(answers: Sequence[Decoded | BaseException], at_once: int = 1) -> bytes:
    """Return the Decoder's answer to a call; ``at_once`` is how many calls it wants at a time."""
    good = [one for one in answers if isinstance(one, Decoded)]
    faults = {
        str(part): {str(i): [f.status, f.code, f.message] for i, f in one.faults.items()}
        for part, one in enumerate(answers)
        if isinstance(one, Decoded) and one.faults
    }
    num_rows = [len(one.images) if isinstance(one, Decoded) else 0 for one in answers]
    times = [[time_ms for one in good for time_ms in one.decode_ms]]
    images = [np.ascontiguousarray(one.images) for one in good if one.images.size]
    # Height and width; bytes and 0 of images that are the inputs of several sizes.
    sizes = (*images[0].shape[1:], 0)[:2] if images else (0, 0)
    notes: Notes = {"errors": _errors(answers), "faults": faults}
    fingerprint = good[0].model_set_fingerprint if good else ""
    return _packed(DECODED, at_once, num_rows, sizes, times, images, notes, fingerprint)


def calls_at_once(message: bytes) -> int:
    """Return how many calls at a time the replica wants, of an answer that has been read."""
    return max(1, int(ANSWER_HEAD.unpack_from(message)[1]))


def read_decoded(message: bytes) -> list[Decoded | TandemError]:
    """Return what each part of a call gets; raise :class:`MessageError` if it is no answer."""
    answer = _read(message, DECODED)
    times_ms = answer.times[0].tolist()
    told = answer.notes["faults"]
    found: list[Decoded | TandemError] = []
    for part, (rows, error) in enumerate(zip(answer.ranges(), answer.errors(), strict=True)):
        faults = {int(i): Fault(*fault) for i, fault in told.get(str(part), {}).items()}
        images, times = answer.rows[rows], tuple(times_ms[rows])
        found.append(error or Decoded(images, faults, times, answer.fingerprint))
    return found


def pack_classified(answers: Sequence[MemberAnswer | BaseException], at_once: int = 1) -> bytes:
    """Return a member's answer to a call; ``at_once`` is how many calls it wants at a time."""
    good = [one for one in answers if isinstance(one, MemberAnswer)]
    num_rows = [len(one.batch_size) if isinstance(one, MemberAnswer) else 0 for one in answers]
    times: list[list[float]] = [
        [time_ms for one in good for time_ms in one.queue_ms],
        [time_ms for one in good for time_ms in one.infer_ms],
        [size for one in good for size in one.batch_size],
    ]
    rows = [np.ascontiguousarray(one.probabilities, np.float32) for one in good]
    sizes = rows[0].shape[1] if rows else 0, 0
    notes = {"errors": _errors(answers)}
    fingerprint = good[0].model_set_fingerprint if good else ""
    return _packed(CLASSIFIED, at_once, num_rows, sizes, times, rows, notes, fingerprint)


def read_classified(message: bytes) -> list[MemberAnswer | TandemError]:
    """Return what each part of a call gets; raise :class:`MessageError` if it is no answer."""
    answer = _read(message, CLASSIFIED)
    queue_ms, infer_ms = (answer.times[i].tolist() for i in (0, 1))
    batch_size = answer.times[2].astype(int).tolist()
    return [
        error
        or MemberAnswer(
            answer.rows[rows],
            tuple(queue_ms[rows]),
            tuple(infer_ms[rows]),
            tuple(batch_size[rows]),
            answer.fingerprint,
        )
        for rows, error in zip(answer.ranges(), answer.errors(), strict=True)
    ]


def _packed(
    kind: bytes,
    at_once: int,
    num_rows: Sequence[int],
    sizes: tuple[int, ...],
    times: Sequence[Iterable[float]],
    rows: Iterable[npt.NDArray[Any]],
    notes: Notes,
    fingerprint: str,
) -> bytes:
    text = fingerprint.encode()
    noted = json.dumps(notes).encode() if any(notes.values()) else b""
    counted = (at_once, len(num_rows), sum(num_rows))
    head = ANSWER_HEAD.pack(kind, *counted, *sizes, len(noted), len(text))
    counts = np.array(num_rows, "<u4").tobytes()
    numbers = np.array(times, "<f4").tobytes()
    return b"".join((head, counts, numbers, *(each.data.cast("B") for each in rows), noted, text))


def _read(message: bytes, kind: bytes) -> _Answer:
    reader = MessageReader(message)
    head_kind, _, num_parts, num_rows, *sizes = reader.fields(ANSWER_HEAD)
    first, second, notes_bytes, text_bytes = sizes
    check(head_kind == kind, "this is no answer of this version")
    counts = reader.array("<u4", num_parts).tolist()
    check(sum(counts) == num_rows, "there are not as many rows as announced")
    times = reader.array("<f4", NUM_TIMES[kind] * num_rows).reshape(NUM_TIMES[kind], num_rows)
    if kind == DECODED:
        shape = (first, second, 3) if second or not first else (first,)
        rows = reader.array("u1", num_rows * math.prod(shape)).reshape(num_rows, *shape)
    else:
        rows = reader.array("<f4", num_rows * first).reshape(num_rows, first)
    notes: Notes = {"errors": {}, "faults": {}} | _notes(reader.view(notes_bytes))
    fingerprint = bytes(reader.view(text_bytes)).decode()
    reader.end()
    return _Answer(counts, times, rows, notes, fingerprint)


def _notes(text: memoryview) -> Notes:
    try:
        notes: Notes = json.loads(bytes(text)) if text else {}
    except ValueError as error:
        raise MessageError("the notes are no JSON") from error
    return notes


def _errors(answers: Sequence[object]) -> dict[str, list[Any]]:
    """Return the errors among the answers, by place: the class's name and its arguments."""
    return {
        str(place): named_error(one)
        for place, one in enumerate(answers)
        if isinstance(one, BaseException)
    }


def named_error(error: BaseException) -> list[Any]:
    """Return the name of an error's class, and its arguments if it is one of ours."""
    return [type(error).__name__, list(error.args) if isinstance(error, TandemError) else []]


def error_named(name: str, arguments: Sequence[str | float]) -> TandemError:
    """Return an error of ours anew; any other means that the stage failed."""
    found = next((one for one in _tree(TandemError) if one.__name__ == name), None)
    if found is None:
        return NotReadyError(f"a stage of the graph failed ({name}); try again")
    return found(*arguments)


def _tree(root: type[TandemError]) -> Iterator[type[TandemError]]:
    """Return the errors of the tree below ``root``, and it."""
    yield root
    for below in root.__subclasses__():
        yield from _tree(below)
