"""The Decoder deployment: image bytes to one uint8 tensor at the model set's input size."""

import asyncio
import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from app.compute.inference_threads import replica_cores
from app.deployments.loopback import keep_to_loopback
from app.errors import MORE_TIME, DeadlineError
from app.messages import Decoded, Fault
from app.metrics.replica import start_metrics
from app.scaling.costs import DECODE_CPU_MS
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.pipeline import pipeline
from app.tracing.spans import Parent, Value, current_parent, record
from models.errors import TandemError
from models.image import read_image
from models.image_header import read_header
from models.model_set import load_model_set
from models.runtime import Pixels


class _Done(NamedTuple):
    image: Pixels | Fault
    started: float  # time.monotonic
    ended: float


class Decoder:
    """Decodes on its own threads (OpenCV gives up the GIL), so the replica's loop stays free."""

    def __init__(self, settings: Settings) -> None:
        keep_to_loopback()
        pipeline.start(settings)
        start_metrics()
        cv2.setNumThreads(1)  # images run beside each other, not one on every core
        model_set = load_model_set(settings.model_set, settings.model_search)
        self._rule = model_set.manifest.image.rule
        self._fingerprint = model_set.fingerprint(settings.precision)
        self._max_pixels = settings.max_pixels
        self._threads = ThreadPoolExecutor(settings.decode_threads, "decode")
        self._usage = Usage(replica_cores(settings.decode_threads), DECODE_CPU_MS)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell the autoscaling policy; Serve calls this when the stage scales."""
        return self._usage.figures()

    async def decode(self, files: list[bytes], left_s: float = math.inf) -> Decoded:
        """Decode every file; a bad one becomes a :class:`Fault` and leaves the others alone.

        Raises:
            DeadlineError: ``left_s`` passed before a file had its turn.

        """
        loop, expires = asyncio.get_running_loop(), time.monotonic() + left_s
        jobs = [
            loop.run_in_executor(self._threads, self._decode_one, data, expires) for data in files
        ]
        with self._usage.under_way(len(files)):
            done = await asyncio.gather(*jobs)
        parent = current_parent()
        pixels: list[Pixels] = []
        times_ms: list[float] = []
        faults: dict[int, Fault] = {}
        for index, one in enumerate(done):
            if parent is not None:
                _record(parent, files[index], index, one)
            if isinstance(one.image, Fault):
                faults[index] = one.image
            else:
                pixels.append(one.image)
                times_ms.append((one.ended - one.started) * 1e3)
        size = self._rule.input_size
        images = np.stack(pixels) if pixels else np.empty((0, size, size, 3), np.uint8)
        return Decoded(images, faults, tuple(times_ms), self._fingerprint)

    def _decode_one(self, data: bytes, expires: float) -> _Done:
        started = time.monotonic()
        if started >= expires:
            raise DeadlineError(f"the deadline passed before the image was decoded; {MORE_TIME}")
        image: Pixels | Fault
        try:
            image = read_image(data, self._rule, max_pixels=self._max_pixels)
        except TandemError as error:
            image = Fault.of(error)
        return _Done(image, started, time.monotonic())


def _record(parent: Parent, data: bytes, index: int, done: _Done) -> None:
    """Record one image's span; its size in pixels is that of the file, before resizing."""
    facts: dict[str, Value] = {"tandem.image": index, "tandem.bytes": len(data)}
    with contextlib.suppress(TandemError):
        header = read_header(data)
        facts |= {"tandem.format": header.format}
        facts |= {"tandem.width": header.width, "tandem.height": header.height}
    error = done.image.message if isinstance(done.image, Fault) else None
    record("decode", parent, done.started, done.ended, facts, error=error)
