"""The Combiner deployment: members' probabilities to one readable answer per image."""

from app.deployments.loopback import keep_to_loopback
from app.errors import UPDATING, OtherSetError
from app.messages import Combined
from app.metrics.replica import start_metrics
from app.scaling.costs import COMBINE_CPU_MS
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.pipeline import pipeline
from models.ensemble import Probabilities, average, entropy, top_k
from models.model_set import load_model_set


class Combiner:
    """Averages with the manifest's weights and names the classes."""

    def __init__(self, settings: Settings) -> None:
        keep_to_loopback()
        pipeline.start(settings)
        start_metrics()
        model_set = load_model_set(settings.model_set, settings.model_search)
        self._fingerprint = model_set.fingerprint(settings.precision)
        self._labels = model_set.labels
        self._weights = {member.name: member.weight for member in model_set.manifest.members}
        self._usage = Usage(1, COMBINE_CPU_MS)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell the autoscaling policy; Serve calls this when the stage scales."""
        return self._usage.figures()

    async def combine(self, members: dict[str, Probabilities], k: int) -> list[Combined]:
        """Return one answer per image from float32 (K, C) of every member that answered.

        Raises:
            OtherSetError: the members are of another model set.

        """
        if not members.keys() <= self._weights.keys():
            names = ", ".join(sorted(members))
            raise OtherSetError(f"no such members here: {names}; {UPDATING}")
        rows = average(members, self._weights)
        with self._usage.under_way(len(rows)):
            return [self._one(i, rows[i], members, k) for i in range(len(rows))]

    def _one(
        self, index: int, row: Probabilities, members: dict[str, Probabilities], k: int
    ) -> Combined:
        own = {name: top_k(rows[index], self._labels, k) for name, rows in members.items()}
        firsts = {predictions[0].index for predictions in own.values()}
        best, agreement = top_k(row, self._labels, k), len(firsts) == 1
        return Combined(best, own, agreement, entropy(row), self._fingerprint)
