"""The Decoder: decodes image files to a uint8 tensor of the members' sizes, from a queue.

Interactive files come first, and heavy files are never on every thread. A thread reads a file's
header when it is the file's turn; only then its cost is known. A light file is decoded at once. A
heavy file (a large PNG takes half a second, a photo 2 ms) is queued again with other heavy files:
they may use all threads but one, and the sum of their pixels is limited. So large pictures wait for
each other, and photos pass them. Deadlines are checked at each turn.

A request's only small photo is decoded on the event loop instead (:class:`LoopTurn`).
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import cv2
import numpy as np

from app.answers import Decoded, Fault
from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, HeavyFileError, OverloadedError
from app.queueing.admission import Usage
from app.queueing.fairness import CALLER, FAR_S, CallerShares, CoreShare
from app.queueing.scheduler import BULK_EVERY, SHADOW, Lane, PriorityQueue
from app.settings import Settings
from app.stages.threads import Health, replica_cores
from app.telemetry.spans import DecodedFile, record_decodes
from models.errors import TandemError, TooManyPixelsError
from models.image import CheckedImage
from models.image_geometry import PictureRegion
from models.image_header import read_header
from models.ledger import decoder_cpu_ms
from models.machine import give_back_memory, keep_freed_memory
from models.model_set import ModelSet
from models.network import Pixels

# libavif may decode up to 2^28 pixels, whatever the header says: so never on every thread.
AVIF_PIXELS = 4 * 2**20
HEAVY_PIXELS = 2 * 2**20  # from this size on an image is heavy: about 0.1 s as PNG
# Up to this size the event loop may decode a JPEG, in a few milliseconds.
SMALL_BYTES, SMALL_PIXELS = 256 * 2**10, 2**20
MAX_ON_LOOP = 8  # images that the loop decodes in one turn, while its other work waits
R = TypeVar("R")


class _Outcome(NamedTuple):
    image: Pixels | None  # uint8 BGR, (H, W, 3) or (B,); None for a fault
    file: DecodedFile
    parts: Sequence[Pixels | TandemError] = ()  # of its regions, in place of the image

    def of_regions(self, num: int) -> "list[_Outcome]":
        """Return an outcome for each region; they share the time of the decoding."""
        took_s = (self.file.ended - self.file.started) / num
        file = self.file._replace(ended=self.file.started + took_s)
        if file.fault is not None:
            return [_Outcome(None, file)] * num
        return [
            _Outcome(None, file._replace(fault=Fault.of(part)))
            if isinstance(part, TandemError)
            else _Outcome(part, file)
            for part in self.parts
        ]


_Begin: TypeAlias = "Callable[[bytes], _Outcome | Heavy[_Outcome]]"


class Decoder:
    """Decodes on threads of its own (OpenCV releases the GIL), so the replica's loop stays free.

    A request's only small photo is decoded on the loop instead, while ``leaves_loop_time`` says
    that the batches in this process leave it time: a thread would have to wait for the GIL a dozen
    times per photo, and wake the loop for its result.
    """

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet | None = None,
        queue: "DecodeQueue[_Outcome] | None" = None,
        leaves_loop_time: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the threads; ``queue`` is shared by the sets of a process; None: a new one."""
        cv2.setNumThreads(1)  # one image per core, not one image on every core
        give_back_memory()  # after compiling and checking the members in this process
        keep_freed_memory()
        model_set = model_set or settings.load_set()
        self._inputs = model_set.manifest.inputs.with_profiles(settings.icc_profiles)
        self._inputs.warm_up()
        self._fingerprint = model_set.fingerprint(settings.served_precision)
        self._settings = settings
        self.queue = queue or DecodeQueue[_Outcome](
            settings.decode_threads, settings.max_heavy_pixels
        )
        self._loop_turn: LoopTurn[_Outcome | None] = LoopTurn(self._decode_small, MAX_ON_LOOP)
        self._leaves_loop_time = leaves_loop_time
        self._health = Health("file that is decoded", counts_failures=False)
        cores = replica_cores(settings.decode_threads)
        self.usage = Usage(cores, decoder_cpu_ms(model_set.manifest))
        # For remote callers: one call's files already use several threads.
        self.calls_at_once = max(1, settings.decode_threads // 2)

    @property
    def num_coming(self) -> int:
        return self.queue.num_coming + self._loop_turn.num_waiting

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy, with the event loop's if it has files to decode."""
        return self.queue.num_busy + (self._loop_turn.num_waiting > 0)

    def on_decoded(self, call: Callable[[], None]) -> None:
        """Register a function that is called on the loop whenever a file has been decoded."""
        self.queue.on_end = self._loop_turn.on_end = call

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if decoding hangs; Serve then replaces the replica."""
        self._health.check()

    async def decode(
        self,
        files: list[bytes],
        left_s: float = math.inf,
        lane: Lane = "interactive",
        regions: Sequence[PictureRegion] = (),
        *,
        takes_heavy: bool = True,
    ) -> Decoded:
        """Decode every file; a bad file becomes a :class:`Fault` and does not affect the others.

        With ``regions``, of the only file, the answer has an image or a fault for each of them.

        Raises:
            HeavyFileError: a file is heavy, and ``takes_heavy`` is False or the lane is shadow.
            DeadlineError: ``left_s`` passed before every file had been started.
            OverloadedError: too many pixels of heavy files wait or are decoded.
            TooManyPixelsError: the request's heavy files alone exceed the limit.
        """
        # Heavy files have no lanes: the shadow's would delay those of clients.
        takes_heavy = takes_heavy and lane != SHADOW
        num_images = len(regions or files)
        self.usage.began(num_images)
        is_done = False
        try:
            outcome = None
            if not regions and self._is_for_loop(files, left_s, lane):
                outcome = await self._loop_turn.submit(files[0])
            if outcome is not None:
                outcomes = [outcome]
            else:
                begin = partial(self._begin, regions=regions, takes_heavy=takes_heavy)
                outcomes = await self._by_turns(files, left_s, lane, begin)
            is_done = True
        finally:
            self.usage.ended(num_images, done=is_done)
        record_decodes([outcome.file for outcome in outcomes])
        if regions:
            outcomes = outcomes[0].of_regions(len(regions))
        return self._stacked(outcomes)

    def _is_for_loop(self, files: list[bytes], left_s: float, lane: Lane) -> bool:
        """Whether to try the event loop: for a small file alone, if the loop has time."""
        is_small = len(files) == 1 and len(files[0]) <= SMALL_BYTES
        if not is_small or lane != "interactive" or not left_s > 0:
            return False
        return self._loop_turn.has_room and self._leaves_loop_time()

    def _decode_small(self, data: bytes) -> _Outcome | None:
        """Decode a small photo on the event loop; return None if a thread has to decode it."""
        try:
            checked = self._check(data)
        except TandemError:
            return None  # a thread reports the fault
        header = checked.header
        is_plain = header.format == "jpeg" and not header.has_many_scans
        if not is_plain or header.width * header.height > SMALL_PIXELS:
            return None
        return self._finish(data, checked)

    async def _by_turns(
        self, files: list[bytes], left_s: float, lane: Lane, begin: _Begin
    ) -> list[_Outcome]:
        call = FilesToDecode(lane, time.monotonic() + left_s)
        jobs = [self.queue.submit(call, partial(begin, data)) for data in files]
        try:
            return [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()  # the request failed: its other files need not be decoded

    def _stacked(self, outcomes: list[_Outcome]) -> Decoded:
        pixels: list[Pixels] = []
        times_ms: list[float] = []
        faults: dict[int, Fault] = {}
        for index, (image, file, _) in enumerate(outcomes):
            if file.fault is not None:
                faults[index] = file.fault
            elif image is not None:
                pixels.append(image)
                times_ms.append((file.ended - file.started) * 1e3)
        if len(pixels) == 1:  # the usual case, without a copy
            images = pixels[0][None]
        else:
            images = np.stack(pixels) if pixels else self._inputs.none()
        return Decoded(images, faults, tuple(times_ms), self._fingerprint)

    def _check(self, data: bytes, *, of_regions: bool = False) -> CheckedImage:
        limits = self._settings
        return self._inputs.check(
            data,
            max_pixels=limits.max_pixels,
            max_full_pixels=limits.max_full_pixels,
            of_regions=of_regions,
        )

    def _begin(
        self, data: bytes, *, takes_heavy: bool, regions: Sequence[PictureRegion] = ()
    ) -> "_Outcome | Heavy[_Outcome]":
        """Check a file and decode it unless it is heavy; called on a thread."""
        started = time.monotonic()
        try:
            checked = self._check(data, of_regions=bool(regions))
        except TandemError as error:
            ended, header = time.monotonic(), None
            with contextlib.suppress(TandemError):  # for the file's span, if it can be read
                header = read_header(data)
            return _Outcome(None, DecodedFile(len(data), started, ended, header, Fault.of(error)))
        pixels, is_avif = checked.full_pixels, checked.header.format == "avif"
        if is_avif:
            pixels = max(pixels, min(AVIF_PIXELS, self._settings.max_heavy_pixels))
        of_regions = sum(region.num_pixels(pixels) for region in regions)
        if is_avif or pixels + of_regions > HEAVY_PIXELS:
            if not takes_heavy:
                raise HeavyFileError("a large picture: send it again in a call of its own")
            return Heavy(pixels, partial(self._finish, data, checked, regions=regions))
        return self._finish(data, checked, started, regions)

    def _finish(
        self,
        data: bytes,
        checked: CheckedImage,
        started: float | None = None,
        regions: Sequence[PictureRegion] = (),
    ) -> _Outcome:
        started = time.monotonic() if started is None else started
        image, fault = None, None
        parts: Sequence[Pixels | TandemError] = ()
        try:
            with self._health.run():
                if regions:
                    parts = self._inputs.decode_regions(data, checked, regions)
                else:
                    image = self._inputs.decode(data, checked)
        except TandemError as error:
            fault = Fault.of(error)
        ended = time.monotonic()
        return _Outcome(image, DecodedFile(len(data), started, ended, checked.header, fault), parts)


@dataclass(frozen=True, slots=True)
class Heavy(Generic[R]):
    """The rest of a file's decoding, returned for a heavy file; ``run`` does it."""

    pixels: int
    run: Callable[[], R]


@dataclass(slots=True)
class FilesToDecode:
    """The files of one request, which share a deadline and a lane."""

    lane: Lane
    expires: float  # by the queue's clock
    heavy_pixels: int = field(default=0, init=False)  # of the heavy files seen so far


@dataclass(slots=True, eq=False)
class _Job(Generic[R]):
    call: FilesToDecode
    run: Callable[[], R | Heavy[R]]
    future: asyncio.Future[R]
    share: CoreShare
    due: float  # for the order among its caller's files
    pixels: int = 0  # of a heavy file

    def is_gone(self) -> bool:
        """Whether the file is not needed: its caller has gone, or has an answer."""
        return self.future.done()


# A job after its turn. It has neither result nor error if its caller has gone.
_Ended = tuple[_Job[R], R | None, BaseException | None]


class DecodeQueue(Generic[R]):
    """Decodes files on ``num_threads`` threads; heavy files have ``max_heavy_pixels`` in sum.

    A free thread takes the next file without waiting for the event loop. All methods are called on
    the loop, and ``run`` is called on a thread.
    """

    def __init__(
        self, num_threads: int, max_heavy_pixels: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "decode")
        self._num_threads = num_threads
        self._num_open = 0  # files that have not ended; used on the loop only
        # Called on the loop after a file has ended and its future is done.
        self.on_end: Callable[[], None] = lambda: None
        self._clock, self._max_heavy_pixels = clock, max_heavy_pixels
        self._lock = threading.Lock()  # guards the attributes below
        self._max_heavy = self._num_heavy_free = max(1, num_threads - 1)
        self._callers = CallerShares()
        self._light = PriorityQueue[_Job[R]](self._callers)
        self._heavy: deque[_Job[R]] = deque()
        self._since_heavy = 0  # light files taken since the last heavy file
        self._since_copy = 0  # files taken since the last of the shadow lane
        self._heavy_pixels = 0  # of heavy files that are decoded

    @property
    def num_coming(self) -> int:
        """Images that wait or are decoded, without heavy ones: batches should not wait for them."""
        return self._num_open - len(self._heavy) - (self._max_heavy - self._num_heavy_free)

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy, without heavy files."""
        return min(self.num_coming, self._num_threads)

    def submit(self, call: FilesToDecode, run: Callable[[], R | Heavy[R]]) -> asyncio.Future[R]:
        """Queue a file; ``run`` decodes it, or returns a :class:`Heavy`.

        The future raises:
            DeadlineError: the request's deadline passed before the file's turn.
            OverloadedError: the file is heavy, and too many pixels wait or are decoded.
            TooManyPixelsError: the request's heavy files alone exceed ``max_heavy_pixels``.
        """
        now, future = self._clock(), asyncio.get_running_loop().create_future()
        with self._lock:
            share = self._callers.asks(CALLER.get(), now)
            job = _Job(call, run, future, share, min(call.expires, now + FAR_S))
            self._light.lane(call.lane).add([job])
        self._num_open += 1
        self._call_thread()
        return job.future

    def _call_thread(self) -> None:
        """Let a thread run one more job; a free thread takes the next job by itself."""
        turn = asyncio.get_running_loop().run_in_executor(self._executor, self._run_next)
        turn.add_done_callback(self._had_turn)

    def _run_next(self) -> _Ended[R] | None:
        """Run the next job, on a thread; None if only heavy jobs wait and enough of them run."""
        while True:
            with self._lock:
                job = self._next()
            if job is None:
                return None
            result, error = None, None
            try:
                result = self._run(job)
            except BaseException as raised:
                error = raised
            with self._lock:
                if job.pixels:
                    self._num_heavy_free += 1
                    self._heavy_pixels -= job.pixels
                if not isinstance(result, Heavy):
                    return job, result, error
                if (refusal := self._queue_heavy(job, result)) is not None:
                    return job, None, refusal

    def _run(self, job: _Job[R]) -> R | Heavy[R] | None:
        if job.is_gone():
            return None
        if self._clock() >= job.call.expires:
            late = f"the deadline passed before the image was decoded; {MORE_TIME}"
            raise DeadlineError(late)
        return job.run()

    def _next(self) -> _Job[R] | None:
        """Take the next job: every ``BULK_EVERY``-th is heavy, if any wait and may run."""
        may_be_heavy = self._heavy and self._num_heavy_free
        if may_be_heavy and (not self._light or self._since_heavy >= BULK_EVERY - 1):
            self._since_heavy = 0
            self._num_heavy_free -= 1
            heavy = self._heavy.popleft()
            self._heavy_pixels += heavy.pixels
            return heavy
        self._since_copy += 1
        # A copy that has begun may have a turn for which its version's share of compute was spent.
        if self._light.shadow and (not self._light or self._since_copy >= BULK_EVERY):
            self._since_copy = 0
            return self._light.shadow.popleft()
        if not self._light:
            return None
        self._since_heavy += 1
        return self._light.pop(1.0)

    def _queue_heavy(self, job: _Job[R], heavy: Heavy[R]) -> TandemError | None:
        """Queue a job again as heavy; return an error if there is no room for it."""
        most = self._max_heavy_pixels
        if job.call.heavy_pixels + heavy.pixels > most:
            return TooManyPixelsError(
                f"the large files of this request have over {most:,} pixels to decode, the limit "
                "of all requests together: send fewer files at a time, smaller files, or JPEG"
            )
        waiting = sum(other.pixels for other in self._heavy if not other.is_gone())
        if (num_pixels := self._heavy_pixels + waiting) + heavy.pixels > most:
            return OverloadedError(
                f"{num_pixels:,} pixels of large pictures are being decoded, and "
                f"{heavy.pixels:,} more exceed the limit of {most:,}; {IN_A_SECOND}"
            )
        job.call.heavy_pixels += heavy.pixels
        self._heavy.append(_Job(job.call, heavy.run, job.future, job.share, job.due, heavy.pixels))
        return None

    def _had_turn(self, turn: asyncio.Future[_Ended[R] | None]) -> None:
        if turn.cancelled() or (ended := turn.result()) is None:
            return
        job, result, error = ended
        self._num_open -= 1
        # Threads may have passed over heavy files while enough of them ran. Whether some wait is no
        # matter: the thread may have taken one already, in the turn of a file that waits now.
        if job.pixels:
            self._call_thread()
        if not job.is_gone():
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(cast(R, result))
        self.on_end()  # after the result is set, so that its caller goes on first


class LoopTurn(Generic[R]):
    """Collects the files that arrive in one turn of the loop, and decodes them in the next.

    So each step runs several times in a row: reading, decoding, queueing. Its code and data stay in
    the processor's caches. And the images of a turn reach the members together. A turn has at most
    ``most`` files, since other work of the loop waits for them.
    """

    def __init__(self, decode: Callable[[bytes], R], most: int) -> None:
        self._decode, self._most = decode, most
        self._waiting: list[tuple[bytes, asyncio.Future[R]]] = []
        self.on_end: Callable[[], None] = lambda: None  # as :class:`DecodeQueue`'s

    @property
    def num_waiting(self) -> int:
        """How many files the next turn decodes."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < self._most

    def submit(self, data: bytes) -> asyncio.Future[R]:
        """Return the future of ``decode``'s result; cancelling it leaves the file out."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._decode_all)
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((data, future))
        return future

    def _decode_all(self) -> None:
        files, self._waiting = self._waiting, []
        for data, future in files:
            if future.done():  # its caller has gone
                continue
            try:
                future.set_result(self._decode(data))
            except Exception as error:
                future.set_exception(error)
        asyncio.get_running_loop().call_soon(self.on_end)
