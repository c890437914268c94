"""Chooses samples among the answers, and writes them on its own thread.

No answer waits for a sample or fails because of it: if the queue is full the sample is dropped.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from app.environment import MIB
from app.messages import Fault
from app.metrics.meter import meter
from app.metrics.table import SAMPLES
from app.queueing.circuit_breaker import CircuitBreaker
from app.responses import Classified
from app.samples.places import SamplePlace, place_of
from app.samples.sample import is_chosen, sample_of
from app.settings import Settings

DISAGREEMENTS = "disagreements"  # a subfolder of sample_dir
DISAGREEMENT_SHARE = 0.25  # of sample_mib, if versions share the traffic
MAX_WAITING, MAX_WAITING_BYTES = 256, 64 * MIB
logger = logging.getLogger("ray.serve")


class WaitingSample(NamedTuple):
    """A sampled image that waits to be written."""

    image: bytes
    answer: Classified
    place: int
    when: datetime
    other: Classified | None = None  # of a version that disagrees


def record_sample(result: str) -> None:
    """Count a sampled image by its result: written, dropped or failed."""
    meter.count(SAMPLES, result=result)


class Sampler:
    """Writes ``ratio`` of the answered images, with their answers, to ``place``."""

    def __init__(
        self,
        ratio: float,
        place: SamplePlace,
        observe: Callable[[str], None] = record_sample,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._ratio, self._place, self._observe, self._now = ratio, place, observe, now
        self._waiting: deque[WaitingSample] = deque()
        self._num_bytes = 0  # of the images that wait
        self._breaker = CircuitBreaker()
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="samples", daemon=True).start()

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Queue the request's sampled images; images answered with an error are left out.

        ``files`` and ``answers`` are in the same order; ``files`` is empty if the client sent
        pixels.
        """
        for place, (image, answer) in enumerate(zip(files, answers, strict=False)):
            if isinstance(answer, Classified) and is_chosen(request_id, place, self._ratio):
                self._take(WaitingSample(image, answer, place, self._now()))

    def note_disagreement(
        self, image: bytes, answer: Classified, other: Classified, place: int
    ) -> None:
        """Take an image that another version answers differently; ``place``: in its request."""
        self._take(WaitingSample(image, answer, place, self._now(), other))

    def _take(self, chosen: WaitingSample) -> None:
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING
            if is_full or self._num_bytes + len(chosen.image) > MAX_WAITING_BYTES:
                self._observe("dropped")
                return
            self._waiting.append(chosen)
            self._num_bytes += len(chosen.image)
            self._changed.notify()

    def _write_all(self) -> None:
        """Write queued samples, for as long as the process lives."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                chosen = self._waiting.popleft()
                self._num_bytes -= len(chosen.image)
            self._observe(self._write(chosen))

    def _write(self, chosen: WaitingSample) -> str:
        """Write a sample and return the result; after failures the place is tried less often."""
        if not self._breaker.allows():
            return "failed"
        try:
            sample = sample_of(*chosen)
            is_kept = self._place.write(sample)
        except Exception as error:
            if self._breaker.failed():
                logger.error(
                    "cannot write samples (%s: %s); requests are answered without, and writing is "
                    "retried from time to time",
                    type(error).__name__,
                    error,
                )
            return "failed"
        if self._breaker.succeeded():
            logger.info("samples can be written again")
        return "written" if is_kept else "dropped"


def sampler_of(settings: Settings) -> Sampler | None:
    """Return the sampler that the settings ask for; None if they ask for none."""
    if settings.sample_dir is None or settings.sample_ratio == 0:
        return None
    share = 1 - DISAGREEMENT_SHARE if settings.has_versions else 1
    place = place_of(settings.sample_dir, int(share * settings.sample_mib * MIB))
    return Sampler(settings.sample_ratio, place)


def disagreement_sampler_of(settings: Settings) -> Sampler | None:
    """Return the sampler of photos that versions disagree on; None: they are not kept."""
    if settings.sample_dir is None or not settings.has_versions:
        return None
    folder = f"{settings.sample_dir.rstrip('/')}/{DISAGREEMENTS}"
    place = place_of(folder, int(DISAGREEMENT_SHARE * settings.sample_mib * MIB))
    return Sampler(0.0, place)
