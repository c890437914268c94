"""Serve's own default autoscaling in the simulator: its functions, called with simulated figures.

What a handle does with its figures before they reach the policy (a sample every fifth of
``look_back_period_s``, a push every ``metrics_interval_s``) is done here as Serve 2.60 does it.
"""

from collections.abc import Mapping, Sequence

from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve._private.metrics_utils import aggregate_timeseries
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from tests.support.scaled_simulation import ScaledReplica, ScaledService

RECORD_SHARE = 0.2  # RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR


class ServeDefault:
    """The default policy for each stage by itself, ``targets`` requests under way a replica."""

    def __init__(self, service: ScaledService, targets: Mapping[str, float]) -> None:
        front = service.steps[0][0]
        self._stages = {
            name: _DefaultStage(
                name,
                AutoscalingConfig(
                    min_replicas=stage.min_replicas,
                    max_replicas=stage.max_replicas,
                    target_ongoing_requests=targets[name],
                ),
            )
            for name, stage in service.stages.items()
        }
        self._front = front

    def decide(
        self, now: float, running: Mapping[str, Sequence[ScaledReplica]], targets: Mapping[str, int]
    ) -> Mapping[str, int]:
        ongoing = {name: sum(r.num_ongoing for r in of) for name, of in running.items()}
        ongoing[self._front] = sum(ongoing.values())  # a request is the Gateway's all the while
        return {
            name: stage.decide(now, ongoing[name], len(running[name]), targets[name])
            for name, stage in self._stages.items()
        }


class _DefaultStage:
    def __init__(self, name: str, config: AutoscalingConfig) -> None:
        self._id, self._config = DeploymentID(name=name, app_name="tandem"), config
        self._samples: list[TimeStampedValue] = []
        self._pushed: list[TimeStampedValue] = []
        self._policy_state: dict = {}

    def decide(self, now: float, ongoing: float, running: int, target: int) -> int:
        config = self._config
        every_s = min(config.look_back_period_s * RECORD_SHARE, config.metrics_interval_s)
        if now % every_s == 0:
            self._samples.append(TimeStampedValue(now, ongoing))
        if now % config.metrics_interval_s == 0:
            since = now - config.look_back_period_s
            self._samples = [sample for sample in self._samples if sample.timestamp > since]
            self._pushed = list(self._samples)
        if not self._pushed:
            return target
        mean = aggregate_timeseries(
            self._pushed,
            config.aggregation_function,
            last_window_s=max(now - self._pushed[-1].timestamp, 1e-3),
        )
        wanted, _ = replica_queue_length_autoscaling_policy(self._context(mean, running, target))
        wanted = _apply_scaling_factors(wanted, running, config)
        decided, self._policy_state = _apply_delay_logic(
            max(0, wanted), target, config, self._policy_state, _now=now
        )
        return max(config.min_replicas, min(config.max_replicas, decided))

    def _context(self, total: float, running: int, target: int) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=self._id,
            deployment_name=self._id.name,
            app_name=self._id.app_name,
            current_num_replicas=running,
            target_num_replicas=target,
            running_replicas=[],
            total_num_requests=total,
            total_queued_requests=None,
            aggregated_metrics=None,
            raw_metrics=None,
            capacity_adjusted_min_replicas=self._config.min_replicas,
            capacity_adjusted_max_replicas=self._config.max_replicas,
            policy_state=self._policy_state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=self._config,
        )
