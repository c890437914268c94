"""Adapts the policy to Ray Serve's application-level ``autoscaling_policy``; formats Serve's log.

Serve passes the replicas' reports (``record_autoscaling_stats``), and applies each deployment's
limits and delays to the result. Set these delays to 0, since the policy has its own.

Pods of a cluster show what Serve writes to stderr. Ray 2.60 writes text there
(``RAY_SERVE_LOG_TO_STDERR``), whatever ``logging_config`` says; here it gets the format of Serve's
files.
"""

import logging
from collections.abc import Mapping
from logging.handlers import MemoryHandler
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingContext

from app.queueing.usage import FIGURES, UsageReport
from app.serve.scaling import (
    ScalingOptions,
    StageMeter,
    StageState,
    State,
    UsageReports,
    decide,
    demand,
)

logger = logging.getLogger("ray.serve")
Decisions = dict[Any, int]
Contexts = Mapping[Any, AutoscalingContext]  # by DeploymentID
LOG_EVERY_S = 60.0


class EnsemblePolicy:
    """Sizes every stage that scales; never raises: after an error the replicas stay as they are."""

    def __init__(self, **policy_kwargs: Any) -> None:
        write_to_stderr_as_to_files()  # of Serve's controller, in which policies run
        self._options: ScalingOptions | None = None
        self._state = State()
        self._meters: dict[str, StageMeter] = {}
        self._silent_until = 0.0
        try:
            self._options = ScalingOptions.model_validate(policy_kwargs)
        except ValidationError as error:  # raising would stop the controller
            logger.error("policy_kwargs are wrong, so nothing scales: %s", error)

    def __call__(self, contexts: Contexts) -> tuple[Decisions, dict[Any, dict[str, Any]]]:
        """Return the replicas by deployment; deployments that are missing stay as they are."""
        now = max((context.current_time or 0.0 for context in contexts.values()), default=0.0)
        try:
            return self._decide(contexts, now), {}
        except Exception:
            if now >= self._silent_until:
                self._silent_until = now + LOG_EVERY_S
                logger.exception("the autoscaling policy failed; replicas stay as they are")
            return {}, {}

    def _decide(self, contexts: Contexts, now: float) -> Decisions:
        names = [context.deployment_name for context in contexts.values()]
        self._meters = {name: self._meters.get(name) or StageMeter() for name in names}
        stages = {}
        for context in contexts.values():
            name, meter = context.deployment_name, self._meters[context.deployment_name]
            interval_s = context.config.metrics_interval_s if context.config else 0.0
            meter.update(reports_in(context.raw_metrics or {}), now, interval_s)
            if (stage := self._stage(context, meter)) is not None:
                stages[name] = stage
        arriving = demand(self._meters)
        if self._options is None or arriving is None or not stages:
            return {}
        decision = decide(stages, arriving, self._state, now, self._options)
        self._state = decision.state
        for name, replicas in decision.targets.items():
            if replicas != stages[name].target:
                logger.info(
                    "%s: %d -> %d replicas at %.1f images/s, %d under way, %.1f CPU-ms an image",
                    name,
                    stages[name].target,
                    replicas,
                    arriving.rate,
                    arriving.backlog,
                    stages[name].cpu_ms,
                )
        return {
            deployment: decision.targets[context.deployment_name]
            for deployment, context in contexts.items()
            if context.deployment_name in decision.targets
        }

    def _stage(self, context: AutoscalingContext, meter: StageMeter) -> StageState | None:
        """Return a deployment's state; None before enough was measured to size it."""
        configured = self._options.cpu_ms.get(context.deployment_name) if self._options else None
        cpu_ms = meter.cpu_ms() or configured or meter.expected_cpu_ms()
        if not cpu_ms or not meter.cores:
            return None
        return StageState(
            cpu_ms,
            meter.cores,
            max(1, context.capacity_adjusted_min_replicas),  # an image needs every stage
            max(1, context.capacity_adjusted_max_replicas),
            context.target_num_replicas,
        )


def reports_in(raw_metrics: Mapping[str, Mapping[Any, Any]]) -> UsageReports:
    """Return the replicas' reports from Serve's series, which are by figure and replica."""
    series = [raw_metrics.get(name, {}) for name in FIGURES]
    return {
        replica: [
            UsageReport(points[0].timestamp, *(point.value for point in points))
            for points in zip(*(of[replica] for of in series), strict=True)
        ]
        for replica in series[0]
        if all(replica in of for of in series)
    }


def write_to_stderr_as_to_files() -> None:
    """Use the file handler's format for this process's stderr, if it has both."""
    handlers = logging.getLogger("ray.serve").handlers
    files = [(h.target, h.filters) for h in handlers if isinstance(h, MemoryHandler) and h.target]
    for stream in handlers:
        if type(stream) is not logging.StreamHandler:
            continue
        for file, filters in files:
            stream.setFormatter(file.formatter)
            stream.filters = [*stream.filters, *(f for f in filters if f not in stream.filters)]
