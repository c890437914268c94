"""The Decoder deployment: image bytes to one uint8 tensor at the model set's input size."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np

from app.settings import Settings
from app.stages import Decoded, Fault
from models.errors import TandemError
from models.image import read_image
from models.model_set import load_model_set
from models.runtime import Pixels


class Decoder:
    """Decodes on its own threads (OpenCV gives up the GIL), so the replica's loop stays free."""

    def __init__(self, settings: Settings) -> None:
        cv2.setNumThreads(1)  # images run beside each other, not one on every core
        self._rule = load_model_set(settings.model_set, settings.model_search).manifest.image.rule
        self._max_pixels = settings.max_pixels
        self._threads = ThreadPoolExecutor(settings.decode_threads, "decode")

    async def decode(self, files: list[bytes]) -> Decoded:
        """Decode every file; a bad one becomes a :class:`Fault` and leaves the others alone."""
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._threads, self._decode_one, data) for data in files]
        results = await asyncio.gather(*jobs)
        good = [result for result in results if not isinstance(result, Fault)]
        faults = {i: result for i, result in enumerate(results) if isinstance(result, Fault)}
        size = self._rule.input_size
        images = np.stack([g[0] for g in good]) if good else np.empty((0, size, size, 3), np.uint8)
        return Decoded(images, faults, tuple(g[1] for g in good))

    def _decode_one(self, data: bytes) -> tuple[Pixels, float] | Fault:
        started = time.perf_counter()
        try:
            image = read_image(data, self._rule, max_pixels=self._max_pixels)
        except TandemError as error:
            return Fault.of(error)
        return image, (time.perf_counter() - started) * 1e3
