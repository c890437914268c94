"""The Decoder: image bytes to one uint8 tensor, of the members' input or inputs."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from app.compute.health import Health
from app.compute.inference_threads import replica_cores
from app.decoding.loop_turn import LoopTurn
from app.decoding.pool import DecodeProcesses
from app.decoding.process import Photo
from app.decoding.small import SMALL_BYTES, is_small
from app.deployments.observers import DecoderObserver
from app.errors import DecodingDiedError, HeavyFileError
from app.messages import Decoded, Fault
from app.queueing.decode_queue import DecodeCall, DecodeQueue, Heavy
from app.queueing.priority import Lane
from app.scaling.costs import decoder_cpu_ms
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.decodes import DecodedFile
from models.errors import TandemError
from models.image import CheckedImage
from models.image_header import ImageHeader, read_header
from models.memory import give_back_memory, keep_freed_memory
from models.model_set import ModelSet
from models.runtime import Pixels

HEAVY_PIXELS = 2 * 2**20  # to decode, from which on an image is heavy: some 0.1 s as PNG
MAX_ON_LOOP = 8  # images that the loop decodes in one turn: what else it has to do waits so long


class _Outcome(NamedTuple):
    image: Pixels | None  # uint8 BGR, (H, W, 3) or (B,); None: a fault
    file: DecodedFile


class Decoder:
    """Decodes on its own threads (OpenCV gives up the GIL), so the replica's loop stays free.

    A request's only small photo may be decoded elsewhere: on the loop, while it has time enough
    (:meth:`use_loop`), or in a process (:meth:`use_processes`).
    """

    def __init__(self, settings: Settings, model_set: ModelSet | None = None) -> None:
        """Make the threads; ``model_set`` is the settings', if it has been loaded already."""
        cv2.setNumThreads(1)  # images run beside each other, not one on every core
        give_back_memory()  # what the members of this process took to compile and check
        keep_freed_memory()
        model_set = model_set or settings.load_set()
        self._inputs = model_set.manifest.inputs
        self._inputs.warm_up()
        self._fingerprint = model_set.fingerprint(settings.precision)
        self._settings = settings
        self.queue: DecodeQueue[_Outcome] = DecodeQueue(
            settings.decode_threads, settings.max_heavy_pixels
        )
        self._loop_turn: LoopTurn[_Outcome | None] = LoopTurn(self._on_loop, MAX_ON_LOOP)
        self._health = Health("file that is decoded", counts_failures=False)
        self._observer = DecoderObserver()
        self._has_time: Callable[[], bool] = lambda: False
        self._processes: DecodeProcesses | None = None
        self._is_for_processes: Callable[[], bool] = lambda: False
        # Of a remote caller: the files of one call are on several threads.
        self.calls_at_once = max(1, settings.decode_threads // 2)
        expected_ms = decoder_cpu_ms(model_set.manifest)
        self.usage = Usage(replica_cores(settings.decode_threads), expected_ms)

    def use_loop(self, has_time: Callable[[], bool]) -> None:
        """Decode small photos on the event loop whenever ``has_time`` says so.

        A thread would wait for the interpreter a dozen times in each, and the loop would be woken
        for its outcome.
        """
        self._has_time = has_time

    def use_processes(self, processes: DecodeProcesses, is_wanted: Callable[[], bool]) -> None:
        """Let processes decode small photos whenever ``is_wanted`` says so, and they are ready."""
        self._processes, self._is_for_processes = processes, is_wanted

    @property
    def num_coming(self) -> int:
        """Images that wait or are decoded, but for heavy ones."""
        in_processes = 0 if self._processes is None else self._processes.num_open
        return self.queue.num_coming + self._loop_turn.num_waiting + in_processes

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy.

        One is the event loop's, while it has photos to decode, or processes do: then it has no time
        left.
        """
        in_processes = 0 if self._processes is None else self._processes.num_busy
        loop_is_busy = in_processes > 0 or self._loop_turn.num_waiting > 0
        return self.queue.num_busy + in_processes + loop_is_busy

    def tell(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` on the loop whenever a file has ended."""
        self.queue.tell(ended)
        self._loop_turn.tell(ended)
        if self._processes is not None:
            self._processes.tell(ended)

    async def check_health(self) -> None:
        """Tell Serve whether this replica works; one that does not is replaced.

        Raises:
            UnhealthyError: the decoding of a file does not end.

        """
        self._health.check()
        if self._processes is not None:
            self._processes.end_hung()

    async def decode(
        self,
        files: list[bytes],
        left_s: float = math.inf,
        lane: Lane = "interactive",
        *,
        takes_heavy: bool = True,
    ) -> Decoded:
        """Decode every file; a bad one becomes a :class:`Fault` and leaves the others alone.

        Raises:
            HeavyFileError: a file is heavy, and ``takes_heavy`` is not set.
            DeadlineError: ``left_s`` passed before a file had its turn.
            OverloadedError: too many pixels of large files are under way.
            TooManyPixelsError: the request's own large files are more than may ever be.

        """
        observed = self._observer.begin()
        with self.usage.under_way(len(files)):
            outcome = None
            if len(files) == 1 and lane == "interactive" and left_s > 0:
                outcome = await self._small(files[0])
            if outcome is not None:
                outcomes = [outcome]
            else:
                outcomes = await self._by_turns(files, left_s, lane, takes_heavy=takes_heavy)
        self._observer.decoded(observed, [outcome.file for outcome in outcomes])
        return self._stacked(outcomes)

    async def _small(self, data: bytes) -> _Outcome | None:
        """Decode a small photo; None: it is for the threads, where files take turns."""
        if len(data) > SMALL_BYTES:
            return None
        if (
            self._processes is not None
            and self._is_for_processes()
            and (photo := self._processes.submit(data)) is not None
        ):
            return await self._of_process(data, photo)
        if self._loop_turn.has_room and self._has_time():
            return await self._loop_turn.submit(data)
        return None

    def _on_loop(self, data: bytes) -> _Outcome | None:
        try:
            checked = self._check(data)
        except TandemError:
            return None  # a thread tells what is wrong with it
        if not is_small(checked.header):
            return None
        return self._finish(data, checked)

    async def _of_process(
        self, data: bytes, decoding: asyncio.Future[Photo | None]
    ) -> _Outcome | None:
        submitted = time.monotonic()
        try:
            photo = await decoding
        except DecodingDiedError as error:
            ended = time.monotonic()
            file = DecodedFile(len(data), submitted, ended, _header_of(data), Fault.of(error))
            return _Outcome(None, file)
        if photo is None:
            return None
        header = ImageHeader("jpeg", photo.width, photo.height)
        file = DecodedFile(len(data), photo.started, photo.ended, header, None)
        return _Outcome(self._inputs.shaped(photo.pixels), file)

    async def _by_turns(
        self, files: list[bytes], left_s: float, lane: Lane, *, takes_heavy: bool
    ) -> list[_Outcome]:
        call = DecodeCall(lane, time.monotonic() + left_s)
        jobs = [self.queue.submit(call, partial(self._begin, data, takes_heavy)) for data in files]
        try:
            return [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()  # of a request that has failed, what still waits is of no use

    def _stacked(self, outcomes: list[_Outcome]) -> Decoded:
        pixels: list[Pixels] = []
        times_ms: list[float] = []
        faults: dict[int, Fault] = {}
        for index, (image, file) in enumerate(outcomes):
            if file.fault is not None:
                faults[index] = file.fault
            elif image is not None:
                pixels.append(image)
                times_ms.append((file.ended - file.started) * 1e3)
        return Decoded(self._stack(pixels), faults, tuple(times_ms), self._fingerprint)

    def _stack(self, pixels: list[Pixels]) -> Pixels:
        """Return (K, H, W, 3), or (K, B); one image alone, the commonest, is not copied."""
        if len(pixels) == 1:
            return pixels[0][None]
        return np.stack(pixels) if pixels else self._inputs.none()

    def _check(self, data: bytes) -> CheckedImage:
        limits = self._settings
        return self._inputs.check(
            data, max_pixels=limits.max_pixels, max_full_pixels=limits.max_full_pixels
        )

    def _begin(self, data: bytes, takes_heavy: bool) -> _Outcome | Heavy[_Outcome]:
        """Check a file and decode it, unless it is heavy; runs on a thread, as the next does."""
        started = time.monotonic()
        try:
            checked = self._check(data)
        except TandemError as error:
            ended, header = time.monotonic(), _header_of(data)
            return _Outcome(None, DecodedFile(len(data), started, ended, header, Fault.of(error)))
        if checked.full_pixels > HEAVY_PIXELS:
            if not takes_heavy:
                raise HeavyFileError("a large picture: send it again in a call of its own")
            return Heavy(checked.full_pixels, partial(self._finish, data, checked))
        return self._finish(data, checked, started)

    def _finish(self, data: bytes, checked: CheckedImage, started: float | None = None) -> _Outcome:
        started = time.monotonic() if started is None else started
        image, fault = None, None
        try:
            with self._health.run():
                image = self._inputs.decode(data, checked)
        except TandemError as error:
            fault = Fault.of(error)
        ended = time.monotonic()
        return _Outcome(image, DecodedFile(len(data), started, ended, checked.header, fault))


def _header_of(data: bytes) -> ImageHeader | None:
    """Return what a refused file says of itself, if it can be read, for its span."""
    with contextlib.suppress(TandemError):
        return read_header(data)
    return None
