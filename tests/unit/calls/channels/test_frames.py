"""Frames: what is written is read again, however the stream is cut."""

import asyncio
import random

import pytest

from app.calls.channels.frames import FRAME_HEAD, MAX_PAYLOAD_BYTES, FrameKind, FrameProtocol


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written, self.is_aborted = b"", False

    def writelines(self, parts):
        self.written += b"".join(parts)

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True


class Reader(FrameProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, int, bytes]] = []
        self.connection_made(Transport())

    def frame_received(self, kind, number, payload):
        self.frames.append((kind, number, payload))


SENT = [
    (FrameKind.HELLO, 0, b"TnS1"),
    (FrameKind.CALL, 1, b""),
    (FrameKind.CALL, 2**32 - 1, bytes(100_000)),
    (FrameKind.ANSWER, 7, b"x" * 16),
    (FrameKind.PONG, 0, b""),
]


@pytest.mark.parametrize("most", [1, 3, 17, 300_000])
def test_frames_are_read_as_they_were_written(most: int) -> None:
    writer, reader = Reader(), Reader()
    for kind, number, payload in SENT:
        writer.send(kind, number, payload)
    stream, place, draw = writer.transport.written, 0, random.Random(most)
    while place < len(stream):
        size = draw.randint(1, most)
        reader.data_received(stream[place : place + size])
        place += size
    assert reader.frames == SENT


def test_what_is_too_long_ends_the_connection_before_it_is_there() -> None:
    reader = Reader()
    transport = reader.transport
    reader.data_received(FRAME_HEAD.pack(FrameKind.CALL, 1, MAX_PAYLOAD_BYTES + 1) + b"and more")
    assert transport.is_aborted
    assert reader.frames == []
    reader.data_received(b"still more")  # what was on its way


def test_on_a_connection_that_ends_nothing_is_written() -> None:
    reader = Reader()
    transport = reader.transport
    transport.is_aborted = True
    reader.send(FrameKind.PING)
    assert transport.written == b""
    reader.abort()
    reader.send(FrameKind.PING)
