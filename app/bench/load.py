"""The load generator: closed loops with a number of clients, open loops on a schedule.

The requests under way, the time of each, and the whole run are bounded. A child process generates
the load, so that its CPU time is not the service's.
"""

import asyncio
import glob
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import cv2
import numpy as np
import numpy.typing as npt
import psutil

from app.access import ClientTls
from app.bench.measurement import Run, TimedRequest, cpu_seconds
from app.errors import ConfigError
from models.child_process import ChildDiedError, Send, run_apart
from models.errors import TandemError
from models.image_files import KINDS, images_below

MAX_ARRIVALS = 2_000_000
MAX_PHOTO_BYTES = 512 * 2**20  # of photos held in memory; more are left out
MAX_UNDER_WAY = 2000  # of an open loop; further requests count as ``client_full`` and are not sent
REPORT_EVERY_S = 0.25
LATE_S = 30.0  # after a run's time and its requests' time limit, before it is given up

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
    query: str = "top_k=1"
    keeps_answers: bool = False  # as ``TimedRequest.answer``

    def bodies_of(self, number: int) -> list[bytes]:
        """Return the photos of the ``number``-th request, in turn."""
        first = number * self.files_per_request
        every = range(first, first + self.files_per_request)
        return [self.bodies[n % len(self.bodies)] for n in every]

    @property
    def path(self) -> str:
        """The path and query that are measured, with one class in the answer."""
        return f"{self.url}/v1/classify?{self.query}"


@dataclass(frozen=True)
class Load:
    """The load of a run: a closed loop with ``clients``, or an open loop with ``rate``."""

    target: Target
    duration_s: float
    clients: int = 0
    rate: float = 0.0
    seed: int = 20

    @property
    def kind(self) -> str:
        return "open" if self.rate else "closed"

    @property
    def offered(self) -> float:
        return self.rate or float(self.clients)


@dataclass(frozen=True)
class Progress:
    """The progress of a run; the first one says that the child has started."""

    elapsed_s: float = 0.0
    num_done: int = 0
    num_failed: int = 0


ReportProgress = Callable[[Progress], None]


def run_load(
    load: Load, service: psutil.Process | None, report: ReportProgress = lambda _: None
) -> Run:
    """Run ``load`` in a new process and return its result.

    Raises :class:`ConfigError` if the generator died, or did not end in time.
    """
    before: dict[str, float] = {}

    def heard(progress: Progress) -> None:
        if service is not None and not before:  # the service was idle while the child started
            before.update(cpu_seconds(service))
        report(progress)

    limit_s = load.duration_s + load.target.timeout_s + LATE_S
    try:
        run: Run = run_apart(_generate, load, heard=heard, limit_s=limit_s)
    except ChildDiedError as error:
        raise ConfigError(f"the load generator died ({error}); is memory left?") from error
    except TimeoutError:
        raise ConfigError(
            f"the load generator gave no result within {load.duration_s:g} s and its requests' "
            "time; does the service close its connections, and is nothing else busy on this "
            "machine?"
        ) from None
    run.files_per_request = load.target.files_per_request
    if service is not None:
        after = cpu_seconds(service)
        run.service_cpu_s = {stage: after[stage] - before.get(stage, 0.0) for stage in after}
    return run


def _generate(load: Load, send: Send) -> Run:
    """Run the load in the child; send the progress now and then."""
    samples: list[TimedRequest] = []
    num_failed, report_at = 0, 0.0

    def heard(sample: TimedRequest) -> None:
        nonlocal num_failed, report_at
        samples.append(sample)
        num_failed += sample.error is not None
        if sample.finished >= report_at:
            report_at = sample.finished + REPORT_EVERY_S
            send(Progress(sample.finished, len(samples), num_failed))

    send(Progress())
    before = time.process_time()
    if load.rate:
        arrivals = poisson_arrivals(load.rate, load.duration_s, load.seed).tolist()
        asyncio.run(open_loop(load.target, arrivals, heard))
    else:
        asyncio.run(closed_loop(load.target, load.clients, load.duration_s, heard))
    spent = time.process_time() - before
    return Run(load.kind, load.offered, load.duration_s, samples, spent)


def session_for(target: Target, num_connections: int) -> aiohttp.ClientSession:
    """Return a session that reuses its connections, without a proxy."""
    tls = target.tls.context() or True
    connector = aiohttp.TCPConnector(limit=num_connections, keepalive_timeout=60, ssl=tls)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=target.headers)


async def closed_loop(target: Target, clients: int, duration_s: float, hear: Heard) -> None:
    """Let ``clients`` send one request after another for ``duration_s``.

    After a failed request a client goes on with the next, after a pause if nothing listens.
    """
    started = time.perf_counter()
    numbers = count()

    async def client(session: aiohttp.ClientSession) -> None:
        while (now := time.perf_counter() - started) < duration_s:
            error, answer = await _send(session, target, next(numbers))
            hear(TimedRequest(now, time.perf_counter() - started, error, answer))
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
            error, answer = await _send(session, target, number)
            hear(TimedRequest(scheduled, time.perf_counter() - started, error, answer))

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


async def _send(
    session: aiohttp.ClientSession, target: Target, number: int
) -> tuple[str | None, tuple[int, bytes] | None]:
    """Send one request; return the kind of error, or None, and the answer if it is kept."""
    bodies = target.bodies_of(number)
    data = bodies[0] if len(bodies) == 1 else _form(bodies)
    try:
        async with session.post(target.path, data=data) as answer:
            body = await answer.read()
            if answer.status != 200:
                return f"http_{answer.status}", None
            return None, (number, body) if target.keeps_answers else None
    except TimeoutError:
        return "timeout", None
    except aiohttp.ClientConnectionError:
        return "no_connection", None
    except aiohttp.ClientError as error:
        return type(error).__name__, None


def _form(bodies: Sequence[bytes]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for number, body in enumerate(bodies):
        form.add_field("files", body, filename=f"{number}")
    return form


class NothingToClassifyError(TandemError):
    """No image among the given paths."""

    code = "nothing_to_classify"


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Return arrival times of a Poisson process at ``rate`` per s, in s from the start, ascending.

    Raises :class:`ConfigError` if rate or duration is not a positive finite number, or there are
    too many arrivals.
    """
    for name, value in (("rate", rate), ("duration", duration_s)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value}; it must be a number above 0")
    expected = rate * duration_s
    if expected > MAX_ARRIVALS:
        raise ConfigError(
            f"{rate:g} requests/s for {duration_s:g} s are {expected:.0f} requests; "
            f"{MAX_ARRIVALS} is the limit: a lower rate or a shorter time"
        )
    rng = np.random.default_rng(seed)
    num_drawn = math.ceil(expected + 6 * math.sqrt(expected) + 10)
    times = np.cumsum(rng.exponential(1 / rate, num_drawn))
    return np.asarray(times[times < duration_s])


def find_files(paths: list[str]) -> Iterator[Path]:
    """Yield each file once: as named, every image below a folder, or the matches of a glob."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            if not (files := images_below(path)):
                raise NothingToClassifyError(f"no {KINDS} in {path}; name another folder")
        elif path.exists():
            files = [path]
        else:
            # The text is a glob, relative or absolute; Path.glob does not accept absolute ones.
            matches = glob.glob(text, recursive=True)  # noqa: PTH207
            files = [Path(match) for match in sorted(matches) if not Path(match).is_dir()]
            if not files:
                raise NothingToClassifyError(f"no such file or folder: {text}")
        yield from (p for p in files if p not in seen and not seen.add(p))  # type: ignore[func-returns-value]


def photos_in(folder: Path) -> list[bytes]:
    """Read the images of a folder, by name, until ``MAX_PHOTO_BYTES`` are read.

    Raises:
        NothingToClassifyError: the folder has no images.
        ConfigError: an image cannot be read.
    """
    bodies: list[bytes] = []
    total = 0
    for path in find_files([str(folder)]):
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        total += len(body)
        if bodies and total > MAX_PHOTO_BYTES:
            break
        bodies.append(body)
    return bodies


def drawn_photos(num_photos: int = 16, width: int = 500, height: int = 375) -> list[bytes]:
    """Generate JPEGs of the usual size of ImageNet's photos; their contents are meaningless."""
    rng = np.random.default_rng(20)
    bodies = []
    for _ in range(num_photos):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        grainy = cv2.add(smooth, rng.integers(0, 24, smooth.shape, np.uint8))
        bodies.append(cv2.imencode(".jpg", grainy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return bodies
