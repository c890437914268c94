"""The Decoder: decodes image files to a uint8 tensor of the members' input size or sizes."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from app.answers import Decoded, Fault
from app.errors import HeavyFileError
from app.queueing.admission import Usage
from app.queueing.decode_queue import DecodeQueue, FilesToDecode, Heavy, LoopTurn
from app.queueing.scheduler import SHADOW, Lane
from app.settings import Settings
from app.stages.threads import Health, replica_cores
from app.telemetry.spans import DecodedFile, record_decodes
from models.errors import TandemError
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


_Begin = Callable[[bytes], _Outcome | Heavy[_Outcome]]


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
    ) -> _Outcome | Heavy[_Outcome]:
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
