"""Counts what a Gateway answers by the protocol, by model: Triton's statistics extension."""

import time
from collections.abc import Iterable, Sequence

from app.oip.answer import VERSION
from app.oip.documents import AllStatistics, ModelStatistics
from app.responses import Classified


class Statistics:
    """Of the models ``names``, since the process started."""

    def __init__(self, names: Iterable[str]) -> None:
        self._models = {name: ModelStatistics(name, VERSION) for name in names}

    def of(self, name: str | None = None) -> AllStatistics:
        """Return one model's, or everyone's."""
        models = self._models.values() if name is None else [self._models[name]]
        return AllStatistics(list(models))

    def succeeded(self, name: str, took_ms: float, images: Sequence[Classified]) -> None:
        """Count a request that was answered."""
        model = self._models[name]
        model.last_inference = int(time.time() * 1e3)
        model.inference_count += len(images)
        durations = model.inference_stats
        durations.success.add(took_ms)
        if looking_ms := _slowest(images, "cache"):
            is_hit = all(image.cached for image in images)
            (durations.cache_hit if is_hit else durations.cache_miss).add(looking_ms)
            if is_hit:
                return
        model.execution_count += 1
        durations.compute_input.add(_slowest(images, "decode"))
        durations.queue.add(_slowest(images, "queue"))
        durations.compute_infer.add(_slowest(images, "infer"))
        durations.compute_output.add(_slowest(images, "combine"))

    def failed(self, name: str, took_ms: float) -> None:
        """Count a request that was not."""
        self._models[name].inference_stats.fail.add(took_ms)


def _slowest(images: Sequence[Classified], stage: str) -> float:
    times = [s.duration_ms for image in images for s in image.timings_ms.stages if s.stage == stage]
    return max(times, default=0.0)
