"""Loads the service by one way, in a process of its own that lives as long as the study.

So the CPU time of a turn has nothing of the process's start, and is not the service's.
"""

import asyncio
import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import TypeVar

import uvloop

from app.bench.load import poisson_arrivals
from protocol_study.payloads import Payloads
from protocol_study.senders import sender
from protocol_study.ways import Address, Sender, SendError, Way

GRACE_S = 60.0
MAX_UNDER_WAY = 256  # of an open loop; whoever comes beyond is counted as ``client_full``
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """A closed loop of ``clients``, or Poisson arrivals at ``rate`` requests/s."""

    way: Way
    seconds: float
    clients: int = 0
    rate: float = 0.0
    seed: int = 0


@dataclass
class Sent:
    """What became of the requests of a turn."""

    latencies_ms: list[float] = field(default_factory=list)  # of those that were answered
    errors: dict[str, int] = field(default_factory=dict)
    why: str = ""  # of the first error
    seconds: float = 0.0
    client_cpu_s: float = 0.0

    def failed(self, error: SendError) -> None:
        self.errors[error.kind] = self.errors.get(error.kind, 0) + 1
        self.why = self.why or str(error)


class Generator:
    """The process, and how turns get to it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self, turn: Turn, snapshot: Callable[[], T]) -> tuple[Sent, T, T]:
        """Return what became of a turn, and a snapshot from before and after."""
        self._pipe.send(turn)
        self._receive(GRACE_S)  # connected, and one request answered
        before = snapshot()
        self._pipe.send("go")
        sent = self._receive(turn.seconds + GRACE_S)
        assert isinstance(sent, Sent)
        return sent, before, snapshot()

    def _receive(self, seconds: float) -> object:
        if not self._pipe.poll(seconds):
            raise SystemExit(f"the load generator told nothing for {seconds:g} s")
        told = self._pipe.recv()
        if isinstance(told, SendError):
            raise told
        if isinstance(told, str) and told != "ready":
            raise SystemExit(f"the load generator failed:\n{told}")
        return told


@contextlib.contextmanager
def generating(address: Address, payloads: Payloads) -> Iterator[Generator]:
    """Start the process; yield what hands it turns; end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(address, payloads, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Generator(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(address: Address, payloads: Payloads, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    while True:
        turn = pipe.recv()
        try:
            pipe.send(uvloop.run(_turn(turn, address, payloads, pipe)))
        except SendError as error:
            pipe.send(error)
        except Exception:  # told to the parent, which ends
            pipe.send(traceback.format_exc())


async def _turn(turn: Turn, address: Address, payloads: Payloads, pipe: Connection) -> Sent:
    places = turn.clients or MAX_UNDER_WAY
    async with sender(turn.way, address, payloads, places) as send:
        await send(0)  # connected, and refused here if it is refused at all
        pipe.send("ready")
        pipe.recv()
        sent, started, before = Sent(), time.perf_counter(), time.process_time()
        if turn.rate:
            await _open_loop(turn, send, sent)
        else:
            await _closed_loop(turn, send, sent)
        sent.seconds = time.perf_counter() - started
        sent.client_cpu_s = time.process_time() - before
    return sent


async def _closed_loop(turn: Turn, send: Sender, sent: Sent) -> None:
    started, numbers = time.perf_counter(), count()

    async def client() -> None:
        while (now := time.perf_counter()) - started < turn.seconds:
            await _one(send, next(numbers), now, sent)

    await asyncio.gather(*(client() for _ in range(turn.clients)))


async def _one(send: Sender, number: int, scheduled: float, sent: Sent) -> None:
    try:
        await send(number)
    except SendError as error:
        sent.failed(error)
        await asyncio.sleep(0.01)
    else:
        sent.latencies_ms.append((time.perf_counter() - scheduled) * 1e3)


async def _open_loop(turn: Turn, send: Sender, sent: Sent) -> None:
    """Send each request at its time; its latency counts from then."""
    started, under_way = time.perf_counter(), set[asyncio.Task[None]]()
    for number, at in enumerate(poisson_arrivals(turn.rate, turn.seconds, turn.seed).tolist()):
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        if len(under_way) >= MAX_UNDER_WAY:
            sent.failed(SendError("client_full"))
            continue
        task = asyncio.create_task(_one(send, number, started + at, sent))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)
