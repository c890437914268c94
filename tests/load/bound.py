"""The bound that a service is held against, kept ready and measured in turns with it."""

import time
from collections.abc import Sequence

from calibration.offline import InProcessPipeline, measure_upper_bound
from models.model_set import load_model_set

KEPT = 3  # setups whose difference is within the noise; the best of them counts, each time anew


class Bound:
    """The best in-process setups of this machine."""

    def __init__(self, bodies: Sequence[bytes], name: str = "imagenette") -> None:
        model_set = load_model_set(name)
        self._bodies = bodies
        self.limit = measure_upper_bound(model_set, bodies, rounds=3, seconds=1.5)
        rates = self.limit.setups
        setups = sorted(rates, key=lambda setup: -rates[setup])[:KEPT]
        self._rates = [rates[setup] for setup in setups]
        self._pipelines = [InProcessPipeline(model_set, "INT8", setup) for setup in setups]

    def measure(self, seconds: float) -> float:
        """Return the best setup's images/s now; ``seconds`` are shared by the setups."""
        return self.measure_cpu(seconds)[0]

    def measure_cpu(self, seconds: float) -> tuple[float, float]:
        """Return the best setup's images/s now, and its CPU time of an image in ms."""
        found = []
        for pipeline, rate in zip(self._pipelines, self._rates, strict=True):
            each = pipeline.setup.streams * pipeline.setup.batch_size
            num_batches = max(1, round(rate * seconds / KEPT / each)) * pipeline.setup.streams
            before = time.process_time()
            images_per_s = pipeline.run(self._bodies, num_batches)
            spent = time.process_time() - before
            num_images = num_batches * pipeline.setup.batch_size
            found.append((round(images_per_s, 2), round(spent / num_images * 1e3, 3)))
        return max(found)
