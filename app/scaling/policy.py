"""The autoscaling policy: a pure function from measured demand to replicas of every stage.

Every image visits every stage, so all stages are sized for the same rate, each by its cost per
image. This module does not depend on Ray, and time is passed in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

Replicas = Mapping[str, int]  # by stage


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


SIGMAS = 4.0  # standard deviations of Poisson noise, sqrt(n) of n arrivals, that change nothing
COST_BAND = 0.2  # share by which a cost may move without effect: batches fill and empty
USUAL_S = 0.5  # images that arrive in this time may be under way; they are no backlog
USUAL_WORK = 3.0  # likewise images whose work is this many times the CPU time of one


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
    asked = demand.rate + _excess(demand, stages) / options.drain_s
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


def _excess(demand: Demand, stages: Mapping[str, StageState]) -> float:
    """Return how many images are under way beyond the usual number at this rate."""
    usual_s = max(USUAL_S, USUAL_WORK * sum(s.cpu_ms for s in stages.values()) / 1e3)
    return max(0.0, demand.backlog - demand.rate * usual_s)


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
