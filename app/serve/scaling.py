"""The autoscaling policy: from the replicas' usage reports to replicas of every stage.

Every image visits every stage, so all stages are sized for the same rate, each by its cost per
image. This module does not import Ray, and time is passed in. Report times are by each replica's
clock, and times of two clocks are never compared.
"""

import logging
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from app.environment import mark_own_lines, write_to_stderr_as_to_files
from app.queueing.admission import FIGURES, UsageReport

Replicas = Mapping[str, int]  # by stage
SIGMAS = 4.0  # standard deviations of Poisson noise, sqrt(n) of n arrivals, that change nothing
COST_BAND = 0.2  # share by which a cost may move without effect: batches fill and empty
USUAL_S = 0.5  # images that arrive in this time may be under way; they are no backlog
USUAL_WORK = 3.0  # likewise images whose work is this many times the CPU time of one
UsageReports = Mapping[Hashable, Sequence[UsageReport]]  # by replica, oldest first
# A rate is counted over the shortest window with enough arrivals. So a step in the load shows soon,
# but the noise of few images per second is not taken for a change.
WINDOWS_S = (5.0, 10.0, 20.0, 40.0)
ENOUGH_ARRIVALS = 400  # for a standard deviation of 5 %
ENOUGH_DONE = 50
COST_WINDOW_S = 20.0
# A replica without new reports for this long hangs: its last rate and backlog do not count.
SILENT_AFTER_S = 5.0
INTERVALS_MISSED = 3.0  # of reports, if the interval is so long that this is later
# Below this, the CPU time of Ray's own loops would count as the images' cost.
BUSY_CORES = 0.3  # of a replica
logger = logging.getLogger("ray.serve")
Decisions = dict[Any, int]
Contexts = Mapping[Any, "Context"]  # by DeploymentID
LOG_EVERY_S = 60.0


class ScalingOptions(BaseModel):
    """``policy_kwargs`` of the application's ``autoscaling_policy``; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_utilization: float = Field(
        0.7, gt=0, le=1, description="share of its cores that a stage may use at the present rate"
    )
    drain_s: PositiveFloat = Field(
        5.0, description="a backlog is sized to be gone within this, once the replicas are there"
    )
    scale_down_after_s: PositiveFloat = Field(
        120.0, description="a replica goes when it was not needed for this long"
    )
    cpu_ms: dict[str, PositiveFloat] = Field(
        {},
        description="CPU-ms of an image by stage, until it is measured; else what the replicas "
        "expect: the manifest's record",
    )


@dataclass(frozen=True, slots=True)
class StageState:
    """The measured state of one stage."""

    cpu_ms: float  # per image
    cores: float  # that a replica can use
    min_replicas: int
    max_replicas: int
    target: int  # replicas requested at present

    def capacity(self, replicas: int) -> float:
        """Return the images/s that keep all cores of this number of replicas busy."""
        return replicas * self.cores * 1e3 / self.cpu_ms

    def needed(self, rate: float, utilization: float = 1.0) -> int:
        """Return the replicas that run at ``utilization`` for ``rate`` images/s, within limits."""
        exact = rate * self.cpu_ms / (self.cores * 1e3 * utilization)
        return self.limited(math.ceil(exact - 1e-9))  # a rounding error must not add a replica

    def limited(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand on a stage."""

    rate: float  # images/s, refused ones included
    window_s: float  # the time over which they were counted
    backlog: float = 0.0  # images under way, waiting or in work


@dataclass(frozen=True, slots=True)
class State:
    """The policy's state between decisions."""

    rate: float | None = None  # images/s for which all stages are sized
    cpu_ms: Mapping[str, float] = field(default_factory=dict)
    wanted: tuple[tuple[float, Replicas], ...] = ()  # (when last wanted, replicas), oldest first


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas for every stage, and the state to keep for the next decision."""

    targets: Replicas
    state: State


def decide(
    stages: Mapping[str, StageState],
    demand: Demand,
    state: State,
    now: float,
    options: ScalingOptions,
) -> Decision:
    """Size every stage for the same rate: up at once, down after a period of lower need.

    The rate and the costs follow the measurement only when it leaves a band around them. The rate's
    band is four standard deviations of a Poisson process up, and twice that down. In every case
    each stage gets enough replicas for the measured rate. A stage at its limit bounds the rate for
    which the others are sized.

    Scaling down works like the stabilization window of Kubernetes' HorizontalPodAutoscaler: the
    result is the highest number wanted within ``scale_down_after_s``.
    """
    usual_s = max(USUAL_S, USUAL_WORK * sum(s.cpu_ms for s in stages.values()) / 1e3)
    excess = max(0.0, demand.backlog - demand.rate * usual_s)  # images beyond those usually there
    asked = demand.rate + excess / options.drain_s
    rate = _settled_rate(asked, demand.window_s, state.rate, options)
    costs = {name: _settled_cost(s.cpu_ms, state.cpu_ms.get(name)) for name, s in stages.items()}
    bound = min((s.capacity(s.max_replicas) for s in stages.values()), default=0.0)
    wanted = {}
    for name, stage in stages.items():
        settled = replace(stage, cpu_ms=costs[name])
        planned = settled.needed(min(rate, bound), options.target_utilization)
        wanted[name] = max(planned, stage.needed(min(asked, bound)))
    before = state.wanted or ((now, {name: s.target for name, s in stages.items()}),)
    history = _remembered(before, wanted, now, options.scale_down_after_s)
    targets = {
        name: s.limited(max(then.get(name, 0) for _, then in history)) for name, s in stages.items()
    }
    return Decision(targets, State(rate, costs, history))


def _settled_rate(
    rate: float, window_s: float, before: float | None, options: ScalingOptions
) -> float:
    """Return the rate to size for: up to the measured rate, down to its upper confidence limit."""
    if before is None:
        return rate
    room = (1 / options.target_utilization - 1) / 2 * before  # half of the free capacity
    if rate > before + min(SIGMAS * math.sqrt(before / window_s), room):
        return rate
    upper = SIGMAS * math.sqrt(max(rate, 1 / window_s) / window_s)
    return rate + upper if rate + 2 * upper < before else before


def _settled_cost(cpu_ms: float, before: float | None) -> float:
    return cpu_ms if before is None or abs(cpu_ms - before) > COST_BAND * before else before


def _remembered(
    history: tuple[tuple[float, Replicas], ...], wanted: Replicas, now: float, for_s: float
) -> tuple[tuple[float, Replicas], ...]:
    """Add the number wanted now; an unchanged number only gets a new time."""
    kept = tuple((at, then) for at, then in history if at > now - for_s and then != wanted)
    return (*kept, (now, dict(wanted)))


class StageMeter:
    """The demand on one stage, from the last reports of its replicas."""

    def __init__(self) -> None:
        self._of: dict[Hashable, _Replica] = {}
        self._speaking: list[_Replica] = []  # replicas that do not hang
        self._cpu_ms: float | None = None

    def update(self, reports: UsageReports, now: float, interval_s: float = 0.0) -> None:
        """Add new reports; drop replicas that are no longer in ``reports``.

        ``now`` is by the caller's clock. A replica reports every ``interval_s``.
        """
        self._of = {replica: self._of.get(replica) or _Replica(now) for replica in reports}
        for replica, sent in reports.items():
            self._of[replica].add(sent, now)
        since = now - max(SILENT_AFTER_S, INTERVALS_MISSED * interval_s)
        self._speaking = [replica for replica in self._of.values() if replica.heard_at > since]

    @property
    def latest(self) -> list[UsageReport]:
        return [replica.kept[-1] for replica in self._of.values() if replica.kept]

    @property
    def is_measured(self) -> bool:
        """Whether a replica has reported twice, so that a rate can be computed."""
        return any(len(replica.kept) > 1 for replica in self._speaking)

    @property
    def backlog(self) -> float:
        return sum(r.kept[-1].images_waiting for r in self._speaking if r.kept)

    @property
    def cores(self) -> float:
        """The fewest cores that any replica can use."""
        return min((report.cores for report in self.latest), default=0.0)

    def demand(self) -> Demand:
        longest = self._rate(WINDOWS_S[-1])
        for window_s in WINDOWS_S:
            rate = self._rate(window_s)
            # A shorter window with too few arrivals may still contradict the longest one.
            noise = SIGMAS * math.sqrt(max(longest * window_s, 1.0))
            if rate * window_s >= ENOUGH_ARRIVALS or abs(rate - longest) * window_s > noise:
                break
        return Demand(rate, window_s, self.backlog)

    def _rate(self, window_s: float) -> float:
        """Return the arrivals of all replicas within a window, divided by its length.

        For a replica that started within the window, the earlier part counts as without arrivals.
        Its rate over its own short time would be added to that of the replicas that served its
        share before.
        """
        spans = self._spans(window_s)
        longest_s = max((span.seconds for span in spans), default=0.0)
        return sum(
            (span.last.images_arrived - span.first.images_arrived)
            / (span.seconds if span.is_whole else longest_s)
            for span in spans
        )

    def cpu_ms(self) -> float | None:
        """Return the CPU-ms of an image; None before enough images were processed."""
        spans = self._spans(COST_WINDOW_S)
        used_ms = sum(span.last.cpu_ms - span.first.cpu_ms for span in spans)
        time_s = sum(span.seconds for span in spans)
        num_done = sum(span.last.images_done - span.first.images_done for span in spans)
        if used_ms > BUSY_CORES * 1e3 * time_s and num_done >= ENOUGH_DONE:
            self._cpu_ms = used_ms / num_done
        return self._cpu_ms

    def expected_cpu_ms(self) -> float | None:
        """Return the CPU-ms of an image that replicas expect; None before the first report."""
        return max((report.expected_cpu_ms for report in self.latest), default=None)

    def _spans(self, window_s: float) -> list["_Span"]:
        """Return each replica's two reports that bound ``window_s``, as far as known.

        All windows end when the replica that is silent for longest was heard. Otherwise requests
        that others get in place of a hanging one would add to its last rate.
        """
        replicas = [replica for replica in self._speaking if len(replica.kept) > 1]
        until = min((replica.heard_at for replica in replicas), default=0.0)
        return [replica.span(window_s, replica.heard_at - until) for replica in replicas]


class _Span(NamedTuple):
    """Two reports of a replica, and whether there are reports from before the window."""

    first: UsageReport
    last: UsageReport
    is_whole: bool

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at


class _Replica:
    """The last reports of a replica, and when the newest arrived by the caller's clock."""

    def __init__(self, now: float) -> None:
        self.kept: deque[UsageReport] = deque()
        self.heard_at = now

    def add(self, reports: Sequence[UsageReport], now: float) -> None:
        """Add new reports; of two with the same time the first counts."""
        if self.kept and reports and reports[-1].at < self.kept[-1].at:
            self.kept.clear()  # the replica's clock was set back
        for report in reports:
            if not self.kept or report.at > self.kept[-1].at:
                self.kept.append(report)
                self.heard_at = now
        while len(self.kept) > 2 and self.kept[-1].at - self.kept[1].at >= 2 * WINDOWS_S[-1]:
            self.kept.popleft()

    def span(self, window_s: float, before_s: float) -> _Span:
        """Return the reports that bound ``window_s`` until ``before_s`` before the newest.

        There must be at least two.
        """
        kept, at = self.kept, attrgetter("at")
        end = max(1, bisect_right(kept, kept[-1].at - before_s + 1e-6, key=at) - 1)
        since = kept[end].at - window_s
        start = bisect_left(kept, since - 1e-6, hi=end - 1, key=at)
        return _Span(kept[start], kept[end], is_whole=kept[0].at <= since + 1e-6)


def demand(meters: Mapping[str, StageMeter]) -> Demand | None:
    """Return the demand of the stage with the most arrivals: the Gateway, which sees refusals too.

    None before anything is measured. A Gateway that does not scale does not report; then the next
    stage counts.
    """
    measured = [meter.demand() for meter in meters.values() if meter.is_measured]
    return max(measured, key=lambda demand: demand.rate, default=None)


class Context(Protocol):
    """The attributes of Serve's ``AutoscalingContext`` that are read here."""

    deployment_name: str
    current_time: float | None
    config: Any
    raw_metrics: Mapping[str, Mapping[Any, Any]] | None
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    target_num_replicas: int


class EnsemblePolicy:
    """Serve's application-level ``autoscaling_policy``: sizes every stage that scales.

    Serve passes the replicas' reports (``record_autoscaling_stats``), and applies each deployment's
    limits and delays to the result. Set these delays to 0, since the policy has its own. It never
    raises: after an error the replicas stay as they are.
    """

    def __init__(self, **policy_kwargs: Any) -> None:
        mark_own_lines()
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
                text = "%s: %d -> %d replicas at %.1f images/s, %d under way, %.1f CPU-ms an image"
                figures = arriving.rate, arriving.backlog, stages[name].cpu_ms
                logger.info(text, name, stages[name].target, replicas, *figures)
        return {
            deployment: decision.targets[context.deployment_name]
            for deployment, context in contexts.items()
            if context.deployment_name in decision.targets
        }

    def _stage(self, context: Context, meter: StageMeter) -> StageState | None:
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
