"""The Decoder: image bytes to one uint8 tensor at the model set's input size."""

import asyncio
import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from app.compute.inference_threads import replica_cores
from app.deployments.observers import DecoderObserver
from app.errors import MORE_TIME, DeadlineError
from app.messages import Decoded, Fault
from app.scaling.costs import DECODE_CPU_MS
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.decodes import DecodedFile
from models.errors import TandemError
from models.image import read_image
from models.image_header import ImageHeader, read_header
from models.model_set import ModelSet, load_model_set
from models.runtime import Pixels


class _Outcome(NamedTuple):
    image: Pixels | None  # (H, W, 3) uint8 BGR; None: a fault
    file: DecodedFile


class Decoder:
    """Decodes on its own threads (OpenCV gives up the GIL), so the replica's loop stays free."""

    def __init__(self, settings: Settings, model_set: ModelSet | None = None) -> None:
        """Make the threads; ``model_set`` is the settings', if it has been loaded already."""
        cv2.setNumThreads(1)  # images run beside each other, not one on every core
        model_set = model_set or load_model_set(settings.model_set, settings.model_search)
        self._rule = model_set.manifest.image.rule
        self._fingerprint = model_set.fingerprint(settings.precision)
        self._max_pixels = settings.max_pixels
        self._threads = ThreadPoolExecutor(settings.decode_threads, "decode")
        self._observer = DecoderObserver()
        self.usage = Usage(replica_cores(settings.decode_threads), DECODE_CPU_MS)

    async def decode(self, files: list[bytes], left_s: float = math.inf) -> Decoded:
        """Decode every file; a bad one becomes a :class:`Fault` and leaves the others alone.

        Raises:
            DeadlineError: ``left_s`` passed before a file had its turn.

        """
        loop, expires = asyncio.get_running_loop(), time.monotonic() + left_s
        call = self._observer.begin()
        is_traced = call.parent is not None
        jobs = [
            loop.run_in_executor(self._threads, self._decode_one, data, expires, is_traced)
            for data in files
        ]
        with self.usage.under_way(len(files)):
            outcomes = await asyncio.gather(*jobs)
        self._observer.decoded(call, [outcome.file for outcome in outcomes])
        return self._stacked(outcomes)

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
        size = self._rule.input_size
        images = np.stack(pixels) if pixels else np.empty((0, size, size, 3), np.uint8)
        return Decoded(images, faults, tuple(times_ms), self._fingerprint)

    def _decode_one(self, data: bytes, expires: float, is_traced: bool) -> _Outcome:
        started = time.monotonic()
        if started >= expires:
            raise DeadlineError(f"the deadline passed before the image was decoded; {MORE_TIME}")
        image, fault = None, None
        try:
            image = read_image(data, self._rule, max_pixels=self._max_pixels)
        except TandemError as error:
            fault = Fault.of(error)
        ended = time.monotonic()
        header = _header_of(data) if is_traced else None
        return _Outcome(image, DecodedFile(len(data), started, ended, header, fault))


def _header_of(data: bytes) -> ImageHeader | None:
    """Return what the file says of itself, for its span; a header may take long to walk."""
    with contextlib.suppress(TandemError):
        return read_header(data)
    return None
