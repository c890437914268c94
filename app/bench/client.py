"""The load generator: closed loops with a number of clients, open loops on a schedule.

The requests under way, the time of each, and the whole run are bounded.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp

from app.access.client_tls import ClientTls
from app.bench.samples import TimedRequest

MAX_UNDER_WAY = 2000  # of an open loop; further requests count as ``client_full`` and are not sent
Heard = Callable[[TimedRequest], None]


@dataclass(frozen=True)
class Target:
    """The target of the load and its photos, which are sent in turn."""

    url: str
    bodies: Sequence[bytes]
    timeout_s: float = 30.0
    files_per_request: int = 1  # more than 1: a multipart form with this many photos
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    tls: ClientTls = field(default_factory=ClientTls)

    def bodies_of(self, number: int) -> list[bytes]:
        """Return the photos of the ``number``-th request, in turn."""
        first = number * self.files_per_request
        every = range(first, first + self.files_per_request)
        return [self.bodies[n % len(self.bodies)] for n in every]

    @property
    def path(self) -> str:
        """The path and query that are measured, with one class in the answer."""
        return f"{self.url}/v1/classify?top_k=1"


def session_for(target: Target, num_connections: int) -> aiohttp.ClientSession:
    """Return a session that reuses its connections, without a proxy."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=num_connections, keepalive_timeout=60, ssl=target.tls.context() or True
        ),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        headers=target.headers,
    )


async def closed_loop(target: Target, clients: int, duration_s: float, hear: Heard) -> None:
    """Let ``clients`` send one request after another for ``duration_s``.

    After a failed request a client goes on with the next, after a pause if nothing listens.
    """
    started = time.perf_counter()
    numbers = count()

    async def client(session: aiohttp.ClientSession) -> None:
        while (now := time.perf_counter() - started) < duration_s:
            error = await _send(session, target, next(numbers))
            hear(TimedRequest(now, time.perf_counter() - started, error))
            if error is not None and not error.startswith("http_"):
                await asyncio.sleep(0.1)

    async with session_for(target, clients) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))


async def open_loop(target: Target, arrivals: Sequence[float], hear: Heard) -> None:
    """Send each request at its scheduled time, whatever happened to earlier ones."""
    under_way: set[asyncio.Task[None]] = set()
    async with session_for(target, MAX_UNDER_WAY) as session:
        started = time.perf_counter()

        async def send(scheduled: float, number: int) -> None:
            error = await _send(session, target, number)
            hear(TimedRequest(scheduled, time.perf_counter() - started, error))

        for number, scheduled in enumerate(arrivals):
            wait = scheduled - (time.perf_counter() - started)
            if wait > 0:
                await asyncio.sleep(wait)
            elif number % 16 == 0:
                await asyncio.sleep(0)  # late already, but answers must be read
            if len(under_way) >= MAX_UNDER_WAY:
                hear(TimedRequest(scheduled, time.perf_counter() - started, "client_full"))
                continue
            task = asyncio.create_task(send(scheduled, number))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way:
            await asyncio.wait(under_way)


async def _send(session: aiohttp.ClientSession, target: Target, number: int) -> str | None:
    """Send one request; return the kind of error, or None."""
    bodies = target.bodies_of(number)
    data = bodies[0] if len(bodies) == 1 else _form(bodies)
    try:
        async with session.post(target.path, data=data) as answer:
            await answer.read()
            return None if answer.status == 200 else f"http_{answer.status}"
    except TimeoutError:
        return "timeout"
    except aiohttp.ClientConnectionError:
        return "no_connection"
    except aiohttp.ClientError as error:
        return type(error).__name__


def _form(bodies: Sequence[bytes]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for number, body in enumerate(bodies):
        form.add_field("files", body, filename=f"{number}")
    return form
