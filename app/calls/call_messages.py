"""A call of many images as bytes: a head, a line for each part, the items' sizes, the items.

Serve pickles what a call is given. Of one bytes object that is a copy; of lists, arrays and
dataclasses it is much of the call's price. Numbers are little-endian, and what a message says of
itself is checked before it is believed.
"""

import struct
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from app.calls.message_reader import MessageReader, check
from app.queueing.priority import LANES, Lane
from app.tracing.parents import SpanIds
from models.runtime import Pixels

KIND = b"TnC1"  # the digit is the version of the format
CALL_HEAD = struct.Struct("<4sBBHIII")  # kind, lane, is alone, 0, parts, height, width; 0: files
LINE = struct.Struct("<dIQQQ")  # s left, items, trace id (high, low), span id; no span: 0
LOW = 2**64 - 1


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
    """Return a call's message; all of its questions are files, or all images of one size."""
    lines: list[bytes] = []
    sizes: list[int] = []
    blobs: list[bytes | memoryview] = []
    height = width = 0
    for files, images, left_s, span in call.questions:
        if images is None:
            sizes += map(len, files)
            blobs += files
        else:
            height, width = images.shape[1:3]
            sizes += [height * width * 3] * len(images)
            blobs += [np.ascontiguousarray(images).data.cast("B")] if images.size else []
        num_items = len(files) if images is None else len(images)
        lines.append(LINE.pack(left_s, num_items, *_three(span)))
    numbers = LANES.index(call.lane), call.is_alone, 0, len(call.questions), height, width
    head = CALL_HEAD.pack(KIND, *numbers)
    return b"".join((head, *lines, np.array(sizes, "<u4").tobytes(), *blobs))


def read_call(message: bytes) -> SharedCall:
    """Return the call that a message is; its images are views of the message.

    Raises:
        MessageError: it is none, or of another version.

    """
    reader = MessageReader(message)
    kind, lane, is_alone, _, num_parts, height, width = reader.fields(CALL_HEAD)
    check(kind == KIND and lane < len(LANES), "this is no call of this version")
    check(num_parts * LINE.size <= reader.num_left, "there are fewer parts than announced")
    lines = [reader.fields(LINE) for _ in range(num_parts)]
    sizes = reader.array("<u4", sum(line[1] for line in lines)).tolist()
    check(sum(sizes) == reader.num_left, "the items are not of the sizes announced")
    check(not height or set(sizes) <= {height * width * 3}, "the images are not of one size")
    each_size = iter(sizes)
    questions = []
    for left_s, num_items, *span in lines:
        own = list(islice(each_size, num_items))
        files, images = [], None
        if height:
            images = reader.array("u1", sum(own)).reshape(num_items, height, width, 3)
        else:
            files = [bytes(reader.view(size)) for size in own]
        questions.append(Question(files, images, left_s, _one(*span)))
    return SharedCall(questions, LANES[lane], bool(is_alone))


def _three(span: SpanIds | None) -> tuple[int, int, int]:
    return (span.trace >> 64, span.trace & LOW, span.span) if span else (0, 0, 0)


def _one(high: int, low: int, span: int) -> SpanIds | None:
    return SpanIds(high << 64 | low, span) if span else None
