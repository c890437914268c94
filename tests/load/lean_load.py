"""A closed loop that costs little CPU time: requests are written once, answers hardly read.

``app/bench`` takes some 0.2 ms a request, as much as a server whose networks cost nothing. This one
takes a fifth of it, in a process of its own, and tells when the load begins: so whoever measures
CPU time sees nothing of the generator's start. Answers must have a Content-Length.
"""

import asyncio
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from math import lcm
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvloop

from app.bench.load import Load, Target
from app.bench.measurement import Run, TimedRequest

GRACE_S = 30.0  # beyond the run's time
BOUNDARY = b"lean-load-boundary"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
T = TypeVar("T")


def run_lean(load: Load, snapshot: Callable[[], T]) -> tuple[Run, T, T]:
    """Run ``load`` (closed); return what it gave, and a snapshot from before and after."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_generate, args=(load, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        _wait(ours, 60)  # its imports
        before = snapshot()
        ours.send(None)
        run: Run = _wait(ours, load.duration_s + load.target.timeout_s + GRACE_S)
        return run, before, snapshot()
    finally:
        process.kill()
        process.join()


def _wait(pipe: Connection, seconds: float) -> Run:
    if not pipe.poll(seconds):
        raise SystemExit(f"the load generator told nothing for {seconds:g} s")
    return pipe.recv()


def _generate(load: Load, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = [_request(load.target, number) for number in range(_period(load.target))]
    pipe.send(None)
    pipe.recv()
    before, started = time.process_time(), time.perf_counter()
    samples = uvloop.run(_closed_loop(load, requests))
    taken, spent = time.perf_counter() - started, time.process_time() - before
    files = load.target.files_per_request
    pipe.send(Run("closed", load.clients, taken, samples, spent, files_per_request=files))


def _period(target: Target) -> int:
    """Return after how many requests the same photos come again."""
    return lcm(len(target.bodies), target.files_per_request) // target.files_per_request


def _request(target: Target, number: int) -> bytes:
    bodies, kind = target.bodies_of(number), b"image/jpeg"
    body = bodies[0]
    if target.files_per_request > 1:
        body, kind = _form(bodies), b"multipart/form-data; boundary=" + BOUNDARY
    path = target.path.removeprefix(target.url).encode()
    return b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        urlsplit(target.url).netloc.encode(),
        kind,
        len(body),
        body,
    )


def _form(bodies: Sequence[bytes]) -> bytes:
    head = b'--%b\r\nContent-Disposition: form-data; name="files"; filename="%d"\r\n\r\n%b\r\n'
    parts = [head % (BOUNDARY, number, body) for number, body in enumerate(bodies)]
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


async def _closed_loop(load: Load, requests: Sequence[bytes]) -> list[TimedRequest]:
    loop, place = asyncio.get_running_loop(), urlsplit(load.target.url)
    course = _Course(load.duration_s, requests)
    for _ in range(load.clients):
        await loop.create_connection(lambda: _Client(course), place.hostname, place.port)
    try:
        async with asyncio.timeout(load.duration_s + load.target.timeout_s):
            await asyncio.gather(*course.ended)
    except TimeoutError:
        late = sum(not future.done() for future in course.ended)
        now = time.perf_counter() - course.started
        course.samples += [TimedRequest(now, now, "timeout")] * late
    return course.samples


class _Course:
    """What the clients of a run share."""

    def __init__(self, duration_s: float, requests: Sequence[bytes]) -> None:
        self.duration_s, self._requests, self._numbers = duration_s, requests, count()
        self.started = time.perf_counter()
        self.samples: list[TimedRequest] = []
        self.ended: list[asyncio.Future[None]] = []

    def next_request(self) -> bytes:
        return self._requests[next(self._numbers) % len(self._requests)]


class _Client(asyncio.Protocol):
    """One request after another on one connection."""

    def __init__(self, course: _Course) -> None:
        self._course, self._answer = course, bytearray()
        self._sent, self._whole = 0.0, 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        course.ended.append(self._ended)

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self._transport = transport
        self._send()

    def _send(self) -> None:
        now = time.perf_counter() - self._course.started
        if now >= self._course.duration_s:
            self._ended.set_result(None)
            self._transport.close()
            return
        self._answer, self._whole, self._sent = bytearray(), 0, now
        self._transport.write(self._course.next_request())

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._whole:
            self._whole = _whole_length(self._answer)
        if self._whole and len(self._answer) >= self._whole:
            status = self._answer[9:12].decode()
            self._note(None if status == "200" else f"http_{status}")
            self._send()

    def _note(self, error: str | None) -> None:
        now = time.perf_counter() - self._course.started
        self._course.samples.append(TimedRequest(self._sent, now, error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Give this client up: a server that closes connections under this load is told so."""
        if not self._ended.done():
            self._note("no_connection")
            self._ended.set_result(None)


def _whole_length(answer: bytearray) -> int:
    """Return how long the answer will be, or 0 while its head is not there."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return 0
    found = LENGTH.search(answer, 0, end)
    if found is None:
        raise SystemExit(f"an answer without Content-Length: {bytes(answer[:end])!r}")
    return end + 4 + int(found[1])
