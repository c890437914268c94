"""Frames: the wire format of a channel, the protocol that parses it, and socket addresses.

A frame is a head of 16 bytes, little-endian (kind, number of the call, length of the payload), and
the payload. Payloads of calls and answers are the messages of :mod:`app.calls.messages`.
"""

import asyncio
import os
import socket
import struct
from abc import ABC, abstractmethod
from enum import IntEnum
from typing import cast

IS_THERE = hasattr(socket, "SO_PEERCRED")  # Linux's; elsewhere all calls go through Ray
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
MAX_NAME = 107  # bytes, after the leading zero
FRAME_HEAD = struct.Struct("<BxxxIQ")
VERSION = b"TnS1"  # the payload of the server's first frame; the digit is the version
MAX_PAYLOAD_BYTES = 2**30  # more than any call or answer has; a longer one is not ours


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 0  # server to client, once
    CALL = 1  # client to server; the server answers with the same number
    ANSWER = 2
    ERROR = 3  # for the call as a whole: JSON with the class's name and arguments
    CANCEL = 4  # client to server: nobody waits for the answer
    PING = 5  # client to server, answered at once
    PONG = 6


class FrameProtocol(asyncio.Protocol, ABC):
    """Reads and writes frames; one over ``MAX_PAYLOAD_BYTES`` ends the connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # received, and not yet a whole frame
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    @abstractmethod
    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame that has arrived whole; the two ends of a channel do so differently."""

    def send(self, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a frame; does nothing if the connection has ended."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines((FRAME_HEAD.pack(kind, number, len(payload)), payload))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME_HEAD.size and self.transport is not None:
            kind, number, length = FRAME_HEAD.unpack_from(self._buffer)
            if length > MAX_PAYLOAD_BYTES:
                self.abort()
                return
            if len(self._buffer) < (end := FRAME_HEAD.size + length):
                return
            with memoryview(self._buffer) as view:  # a slice of the buffer itself would be a copy
                payload = bytes(view[FRAME_HEAD.size : end])
            del self._buffer[:end]
            self.frame_received(kind, number, payload)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None


def address_of(app_name: str, deployment_name: str, replica_id: str) -> str:
    """Return the address; ``replica_id`` is Serve's, drawn anew for each replica."""
    name = f"tandem/{replica_id}/{app_name}/{deployment_name}".encode()[:MAX_NAME]
    return "\0" + name.decode(errors="ignore")


def is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the other end of a connection is a process of this process's user."""
    sock = transport.get_extra_info("socket")
    try:
        with socket.socket(fileno=os.dup(sock.fileno())) as own:  # uvloop's has no getsockopt
            credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    except OSError:  # no file descriptor is left
        return False
    _, uid, _ = CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())
