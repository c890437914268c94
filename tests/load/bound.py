"""The bound that a service is held against, kept ready and measured in turns with it."""

from collections.abc import Sequence

from app.bench.upper_bound import InProcessPipeline, measure_upper_bound
from models.model_set import load_model_set

KEPT = 3  # setups whose difference is within the noise; the best of them counts, each time anew


class Bound:
    """The best in-process setups of this machine."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        model_set = load_model_set("imagenette")
        self._bodies = bodies
        self.limit = measure_upper_bound(model_set, bodies, rounds=3, seconds=1.5)
        setups = sorted(self.limit.setups, key=lambda found: -found.images_per_s)[:KEPT]
        self._rates = [found.images_per_s for found in setups]
        self._pipelines = [InProcessPipeline(model_set, "INT8", found.setup) for found in setups]

    def measure(self, seconds: float) -> float:
        """Return the best setup's images/s now; ``seconds`` are shared by the setups."""
        found = []
        for pipeline, rate in zip(self._pipelines, self._rates, strict=True):
            each = pipeline.setup.streams * pipeline.setup.batch_size
            num_batches = max(1, round(rate * seconds / KEPT / each)) * pipeline.setup.streams
            found.append(pipeline.run(self._bodies, num_batches))
        return round(max(found), 2)
