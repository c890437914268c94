"""The server's end: a stage's replica answers the calls of the Gateways of its node."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable

from app.calls.channels.frames import VERSION, FrameKind, FrameProtocol, is_same_user
from app.calls.messages import named_error
from app.errors import IN_A_SECOND, NotReadyError, OverloadedError
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
Answer = Callable[[bytes], Awaitable[bytes]]  # from a call's message to the answer's
MAX_CALLS = 512  # under way; Gateways send a few for each core
DRAIN_POLL_S = 0.05


class ChannelServer:
    """Listens at ``address`` and answers calls with ``answer``."""

    def __init__(self, address: str, answer: Answer) -> None:
        self._address, self._answer = address, answer
        self._server: asyncio.Server | None = None
        self.num_calls = 0  # calls under way

    async def start(self) -> None:
        """Listen, on the running loop; raise OSError if another process has the address."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:  # uvloop does not accept abstract names
            sock.bind(self._address)
        except BaseException:
            sock.close()
            raise
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self, self._answer), sock=sock
        )

    async def drain(self) -> None:
        """Stop listening, and wait until the calls under way have been answered."""
        if self._server is not None:
            self._server.close()
        while self.num_calls:
            await asyncio.sleep(DRAIN_POLL_S)


class _Connection(FrameProtocol):
    """The connection of one Gateway."""

    def __init__(self, server: ChannelServer, answer: Answer) -> None:
        super().__init__()
        self._server, self._answer = server, answer
        self._calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our version, or close if the other process has another user; asyncio calls this."""
        super().connection_made(transport)
        if is_same_user(transport):
            self.send(FrameKind.HELLO, payload=VERSION)
        else:
            logger.warning("a process of another user connected, and was hung up on")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the calls of the Gateway that is gone; asyncio calls this."""
        self.transport = None
        for task in self._calls.values():
            task.cancel()

    def frame_received(self, kind: int, number: int, payload: bytes) -> None:
        """Start or cancel a call, or answer a ping; close on any other frame."""
        if kind == FrameKind.CALL and number not in self._calls:
            self._begin(number, payload)
        elif kind == FrameKind.CANCEL:
            if (task := self._calls.get(number)) is not None:
                task.cancel()
        elif kind == FrameKind.PING:
            self.send(FrameKind.PONG)
        else:
            self.abort()

    def _begin(self, number: int, message: bytes) -> None:
        if self._server.num_calls >= MAX_CALLS:
            text = f"{MAX_CALLS} calls are under way, as many as may be; {IN_A_SECOND}"
            self._fail(number, OverloadedError(text))
            return
        self._server.num_calls += 1
        task = asyncio.get_running_loop().create_task(self._run(number, message))
        self._calls[number] = task
        task.add_done_callback(lambda done: self._ended(number, done))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._server.num_calls -= 1
        del self._calls[number]
        if task.cancelled():  # if the replica cancelled the call, the caller still waits
            self._fail(number, NotReadyError("the call was ended on its way; try again"))

    async def _run(self, number: int, message: bytes) -> None:
        try:
            answer = await self._answer(message)
        except Exception as error:
            if not isinstance(error, TandemError):
                logger.error("a call failed: %r", error, exc_info=error)
            self._fail(number, error)
        else:
            self.send(FrameKind.ANSWER, number, answer)

    def _fail(self, number: int, error: Exception) -> None:
        self.send(FrameKind.ERROR, number, json.dumps(named_error(error), default=str).encode())
