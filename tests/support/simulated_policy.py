"""The autoscaling policy connected to the simulator, fed as Serve feeds it."""

from collections.abc import Mapping, Sequence

from app.serve.scaling import ScalingOptions, StageMeter, StageState, State, decide, demand
from tests.support.scaled_simulation import ScaledReplica, ScaledService


class PolicyAutoscaler:
    """Measures and decides with the same code as :mod:`app.serve.scaling`."""

    def __init__(self, service: ScaledService, options: ScalingOptions | None = None) -> None:
        self._service, self._options = service, options or ScalingOptions.model_validate({})
        self._meters = {name: StageMeter() for name in service.stages}
        self._state = State()

    def decide(
        self, now: float, running: Mapping[str, Sequence[ScaledReplica]], targets: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the replicas of every stage."""
        stages = {}
        for name, stage in self._service.stages.items():
            meter = self._meters[name]
            meter.update({id(r): list(r.known(now)) for r in running[name]}, now)
            cpu_ms = meter.cpu_ms() or stage.cpu_ms
            limits = (stage.min_replicas, stage.max_replicas)
            stages[name] = StageState(cpu_ms, stage.cores, *limits, targets[name])
        arriving = demand(self._meters)
        if arriving is None:
            return {}
        decision = decide(stages, arriving, self._state, now, self._options)
        self._state = decision.state
        return decision.targets
