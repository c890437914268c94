"""The Decoder: image bytes to one uint8 tensor, of the members' input or inputs."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from app.compute.health import Health
from app.compute.inference_threads import replica_cores
from app.deployments.classifier import Classifier
from app.errors import HeavyFileError
from app.messages import Decoded, Fault
from app.queueing.decode_queue import DecodeQueue, FilesToDecode, Heavy, LoopTurn
from app.queueing.priority import Lane
from app.scaling.costs import decoder_cpu_ms
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.stages import DecodedFile, record_decodes
from models.errors import TandemError
from models.image import CheckedImage
from models.image_header import ImageHeader, read_header
from models.memory import give_back_memory, keep_freed_memory
from models.model_set import ModelSet
from models.runtime import Pixels

# libavif decodes up to 2^28 pixels whatever the header says: never on every thread.
AVIF_PIXELS = 4 * 2**20
HEAVY_PIXELS = 2 * 2**20  # to decode, from which on an image is heavy: some 0.1 s as PNG
# Up to which a JPEG is a small photo, which the event loop may decode: a few milliseconds.
SMALL_BYTES, SMALL_PIXELS = 256 * 2**10, 2**20
MAX_ON_LOOP = 8  # images that the loop decodes in one turn: what else it has to do waits so long
# A loop that decodes is busy with half of a core at so many images a second: where the networks
# answer more, threads decode.
LOOP_IMAGES_PER_S = 250


class _Outcome(NamedTuple):
    image: Pixels | None  # uint8 BGR, (H, W, 3) or (B,); None: a fault
    file: DecodedFile


class Decoder:
    """Decodes on its own threads (OpenCV gives up the GIL), so the replica's loop stays free.

    A request's only small photo is decoded on the loop instead, where members of the same process
    leave it time for that: a thread would wait for the interpreter a dozen times in each, and the
    loop would be woken for its outcome.
    """

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet | None = None,
        members: Sequence[Classifier] = (),
    ) -> None:
        """Make the threads; without ``members`` of this process they decode everything."""
        cv2.setNumThreads(1)  # images run beside each other, not one on every core
        give_back_memory()  # what the members of this process took to compile and check
        keep_freed_memory()
        model_set = model_set or settings.load_set()
        self._inputs = model_set.manifest.inputs
        self._inputs.warm_up()
        self._fingerprint = model_set.fingerprint(settings.served_precision)
        self._settings = settings
        self.queue: DecodeQueue[_Outcome] = DecodeQueue(
            settings.decode_threads, settings.max_heavy_pixels
        )
        self._loop_turn: LoopTurn[_Outcome | None] = LoopTurn(self._decode_small, MAX_ON_LOOP)
        self._health = Health("file that is decoded", counts_failures=False)
        self._members = members
        cores = replica_cores(settings.decode_threads)
        self.usage = Usage(cores, decoder_cpu_ms(model_set.manifest))
        # Of a remote caller: the files of one call are on several threads.
        self.calls_at_once = max(1, settings.decode_threads // 2)

    @property
    def num_coming(self) -> int:
        """Images that wait or are decoded, but for heavy ones."""
        return self.queue.num_coming + self._loop_turn.num_waiting

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy; one is the event loop's, if it is going to decode."""
        return self.queue.num_busy + (self._loop_turn.num_waiting > 0)

    def on_decoded(self, call: Callable[[], None]) -> None:
        """Have ``call`` called on the loop whenever a file has ended."""
        self.queue.on_end = self._loop_turn.on_end = call

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if decoding a file does not end: Serve replaces it."""
        self._health.check()

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
        outcome = None
        with self.usage.under_way(len(files)):
            if len(files) == 1 and lane == "interactive" and left_s > 0:
                outcome = await self._on_loop(files[0])
            if outcome is not None:
                outcomes = [outcome]
            else:
                outcomes = await self._by_turns(files, left_s, lane, takes_heavy=takes_heavy)
        record_decodes([outcome.file for outcome in outcomes])
        return self._stacked(outcomes)

    async def _on_loop(self, data: bytes) -> _Outcome | None:
        """Decode a small photo on the event loop; None: it is for the threads."""
        if len(data) > SMALL_BYTES or not self._loop_turn.has_room or not self._loop_has_time():
            return None
        return await self._loop_turn.submit(data)

    def _loop_has_time(self) -> bool:
        members = self._members
        if not members or any(member.has_backlog for member in members):
            return False
        if all(member.is_idle for member in members):
            return True
        rates = [member.images_per_s for member in members]
        if not all(rates):
            return True
        # Every image passes all members, which share the cores: their times add up.
        return 1 / sum(1 / rate for rate in rates) <= LOOP_IMAGES_PER_S

    def _decode_small(self, data: bytes) -> _Outcome | None:
        try:
            checked = self._check(data)
        except TandemError:
            return None  # a thread says what is wrong with it
        header = checked.header
        is_plain = header.format == "jpeg" and not header.has_many_scans
        if not is_plain or header.width * header.height > SMALL_PIXELS:
            return None
        return self._finish(data, checked)

    async def _by_turns(
        self, files: list[bytes], left_s: float, lane: Lane, *, takes_heavy: bool
    ) -> list[_Outcome]:
        call = FilesToDecode(lane, time.monotonic() + left_s)
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
        if len(pixels) == 1:  # the commonest: not copied
            images = pixels[0][None]
        else:
            images = np.stack(pixels) if pixels else self._inputs.none()
        return Decoded(images, faults, tuple(times_ms), self._fingerprint)

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
        pixels = checked.full_pixels
        if checked.header.format == "avif":
            pixels = max(pixels, AVIF_PIXELS)
        if pixels > HEAVY_PIXELS:
            if not takes_heavy:
                raise HeavyFileError("a large picture: send it again in a call of its own")
            return Heavy(pixels, partial(self._finish, data, checked))
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
