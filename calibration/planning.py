"""Capacity planning: the fewest nodes that handle an arrival rate within a p99.

Each node gets the same replicas. They are sized for the nodes that are left after failures. The p99
is simulated on those, with Poisson arrivals. The simulated images and replicas are bounded, and so
are its time and memory, for any load. What an image costs is recorded with its set, or measured. It
only computes, without Ray or a running service.

In the simulation a replica has cores and a queue. A free core takes waiting images, at most a
batch, as :mod:`app.queueing.batch_queue` does, and is busy for their CPU time. An image goes from
step to step; the stages of a step work on it in parallel. Of two drawn replicas the one with less
work gets it, as in Serve's routing. HTTP and the network are not simulated.
"""

import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from models.ensemble import PlanName
from models.errors import TandemError
from models.ledger import (
    AROUND_CPU_MS,
    MEMBER_APART,
    decoder_cpu_ms,
    gateway_cpu_ms,
    measured_cpu_ms,
    member_cpu_ms,
    records_of_networks,
)
from models.manifest import Manifest
from models.record import Precision

HTTP_MS = 2.8  # of an image in addition to its stages (share-floor-plan.json, overhead_ms now)
# Per replica, at most (configs/xeon-one-socket.yaml); fewer if that fills a node better.
REPLICA_CORES = (4.0, 3.0, 2.0, 1.0)
# The limit of a process, whatever its cores: this much of a photo of 15 to 240 KB runs on its event
# loop under the GIL (0.77 to 0.87 in runs of overhead.py at 64 clients, by thread, with decoding
# elsewhere). For 10 KB it is about 0.5.
SERIAL_CPU_MS = 0.8
SERIAL_BUSY = 0.6  # its highest utilisation, since requests wait for the loop in every stage
CORES_APART = {"Gateway": 1.0, "Decoder": 2.0, "Combiner": 1.0}  # configs/cluster.yaml
MAX_BATCH_SIZE = 8
UTILIZATIONS = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # a stage's highest utilisation, tried in this order
WARM_UP_S, COUNTED_S, COUNTED_IMAGES = 2.0, 10.0, 20_000
# With more nodes than take this many images/s, only some are simulated, with their share of the
# images. Fewer replicas make longer queues, so the result is on the safe side (58 ms for 100,000
# images/s, 55 ms with all nodes).
SIMULATED_RATE = 5000.0
MAX_SIMULATED_IMAGES = 100_000  # for a node that takes more; a few seconds
MAX_NODES = 1000
AROUND = ("Ray", "HAProxy")  # the names in results of tandem bench
MAX_CPU_MS = 1e6  # of an image in a stage; higher values are no measurement
REST = "photos of 15 to 240 KB on two cores with AVX512-VNNI and AMX"

Form = Literal["whole", "members", "stages"]
FORMS: Mapping[Form, str] = {
    "whole": "whole graphs side by side",
    "members": "members apart",
    "stages": "all stages apart",
}
LIMITS = {  # of Requirements: the option, the lowest and the highest value, its unit
    "rate": ("--rate", 0.001, 1e5, "images/s"),
    "p99_ms": ("--p99-ms", 0.001, 1e5, "ms"),
    "node_cores": ("--node-cores", 1, 1024, "cores"),
    "survive_nodes": ("--survive-nodes", 0, 100, "nodes"),
}


class PlanError(TandemError):
    """The load is out of bounds, has no costs, or takes more nodes than are planned."""

    code = "plan"


@dataclass(frozen=True)
class Costs:
    """CPU-ms of an image by stage, and their source."""

    cpu_ms: Mapping[str, float]
    members: tuple[str, ...]
    around_ms: float  # of Ray and HAProxy
    source: str
    # Each member's part of the Gateway's cpu_ms, if known.
    member_ms: Mapping[str, float] = field(default_factory=dict)
    replica_cores: float = REPLICA_CORES[0]  # per replica, at most

    @property
    def is_together(self) -> bool:
        """Whether the members run in the Gateway's process."""
        return not set(self.members) & set(self.cpu_ms)

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """The stages in an image's order; stages of a step run in parallel."""
        order = (("Gateway",), ("Decoder",), self.members, ("Combiner",))
        steps = (tuple(name for name in step if name in self.cpu_ms) for step in order)
        return tuple(step for step in steps if step)

    def cores(self, stage: str) -> float:
        """Return the cores of a replica."""
        if self.is_together and stage == "Gateway":
            # An event loop can keep fewer cores busy if the networks are cheaper.
            kept_busy = SERIAL_BUSY * self.cpu_ms["Gateway"] / SERIAL_CPU_MS
            return float(max(1, min(self.replica_cores, math.floor(kept_busy))))
        return min(self.replica_cores, CORES_APART.get(stage, self.replica_cores))

    @property
    def alone_ms(self) -> float:
        """Latency of a single image without other load, in ms, with its members in parallel."""
        in_turn = sum(max(self.cpu_ms[name] for name in step) for step in self.steps)
        if self.member_ms and self.cores("Gateway") > 1:
            in_turn -= sum(self.member_ms.values()) - max(self.member_ms.values())
        return HTTP_MS + in_turn


@dataclass(frozen=True)
class Requirements:
    """The requirements on the service.

    Raises :class:`PlanError` if a value is outside of ``LIMITS``.
    """

    rate: float  # images/s
    p99_ms: float
    node_cores: int
    survive_nodes: int = 1  # nodes that may fail at a time

    def __post_init__(self) -> None:
        for name, (option, lowest, highest, unit) in LIMITS.items():
            value = getattr(self, name)
            if not lowest <= value <= highest:  # refuses NaN too
                raise PlanError(
                    f"{option} is {value}; it must be from {lowest:g} to {highest:g} {unit}"
                )


@dataclass(frozen=True)
class Plan:
    """The nodes and replicas for a load."""

    nodes: int
    replicas_per_node: Mapping[str, int]
    costs: Costs  # with a replica's planned cores
    utilization: Mapping[str, float]  # with all nodes
    utilization_survived: Mapping[str, float]  # after the failures
    p99_ms: float  # after the failures


def plan(needs: Requirements, costs: Costs, seed: int = 20) -> Plan:
    """Return the plan with the fewest nodes that keep the p99.

    Raises :class:`PlanError` if no number of nodes does.
    """
    if needs.p99_ms < costs.alone_ms:
        raise PlanError(
            f"a p99 of {needs.p99_ms:g} ms is not to be had: one image alone takes "
            f"{costs.alone_ms:.1f} ms; ask for more, or serve smaller networks"
        )
    lowest, tried = math.inf, 0
    for nodes, per_node, sized in _layouts(needs, costs):
        num_simulated = max(1, min(nodes, int(nodes * SIMULATED_RATE / needs.rate)))
        rate = needs.rate * num_simulated / nodes
        p99_ms = _simulated_p99_ms(rate, num_simulated, per_node, sized, seed)
        if p99_ms <= needs.p99_ms:
            every = nodes + needs.survive_nodes
            used, left = (_utilization(needs.rate, n, per_node, sized) for n in (every, nodes))
            return Plan(every, per_node, sized, used, left, p99_ms)
        lowest, tried = min(lowest, p99_ms), nodes
    if not tried:
        raise PlanError(
            f"{needs.rate:g} images/s do not fit {MAX_NODES} nodes with --node-cores "
            f"{needs.node_cores}: Ray and HAProxy take one core or more, and so does each of "
            f"{', '.join(costs.cpu_ms)}; plan with larger nodes, or "
            "with a lower --rate for each of several clusters"
        )
    raise PlanError(
        f"a p99 of {needs.p99_ms:g} ms is not kept even by {tried} nodes that are "
        f"{UTILIZATIONS[-1]:.0%} busy: {lowest:.0f} ms; ask for more, or serve smaller networks"
    )


_Layout = tuple[int, dict[str, int], Costs]  # nodes, replicas on each, costs with their cores


def _layouts(needs: Requirements, costs: Costs) -> list[_Layout]:
    """Return layouts for each utilisation, those with the fewest nodes first.

    Smaller replicas fill a node better; larger ones wait less and need less memory. Among layouts
    with as many nodes it takes the largest replicas.
    """
    layouts: list[_Layout] = []
    for utilization in UTILIZATIONS:
        fewest = math.inf
        for cores in REPLICA_CORES:
            layout = _fewest_nodes(needs, replace(costs, replica_cores=cores), utilization)
            if layout is not None and layout[0] < fewest and layout not in layouts:
                layouts.append(layout)
            fewest = min(fewest, layout[0] if layout is not None else math.inf)
    return sorted(layouts, key=lambda layout: (layout[0], -layout[2].replica_cores))


def _fewest_nodes(needs: Requirements, costs: Costs, utilization: float) -> _Layout | None:
    """Return the layout with the fewest nodes that are at most this busy, or None."""
    needed = {
        name: math.ceil(needs.rate * ms / (1e3 * costs.cores(name) * utilization))
        for name, ms in costs.cpu_ms.items()
    }
    for nodes in range(1, MAX_NODES + 1):
        around = needs.rate * costs.around_ms / (1e3 * utilization * nodes)
        per_node = {name: math.ceil(number / nodes) for name, number in needed.items()}
        taken = sum(number * costs.cores(name) for name, number in per_node.items())
        if taken + max(1.0, around) <= needs.node_cores:
            return nodes, per_node, costs
    return None


def _utilization(
    rate: float, nodes: int, per_node: Mapping[str, int], costs: Costs
) -> dict[str, float]:
    return {
        name: rate * ms / (1e3 * costs.cores(name) * per_node[name] * nodes)
        for name, ms in costs.cpu_ms.items()
    }


def _simulated_p99_ms(
    rate: float, nodes: int, per_node: Mapping[str, int], costs: Costs, seed: int
) -> float:
    """Return the p99 at an HTTP client; infinite if images are refused or late."""
    heavy = {"Gateway"} if costs.is_together else set(costs.members)
    stages = {
        name: SimStage(
            ms, costs.cores(name), per_node[name] * nodes, MAX_BATCH_SIZE if name in heavy else 1
        )
        for name, ms in costs.cpu_ms.items()
    }
    wanted_s = WARM_UP_S + max(COUNTED_S, COUNTED_IMAGES / rate)
    seconds = min(wanted_s, MAX_SIMULATED_IMAGES / rate)
    service = Service(stages, costs.steps)
    outcome = Simulation(service, seed).run(poisson_arrivals(rate, seconds, seed))
    if outcome.refused or outcome.late:
        return math.inf
    return HTTP_MS + outcome.p99_ms(since=min(WARM_UP_S, seconds / 4))


def planned_costs(
    manifest: Manifest, precision: Precision, form: Form = "whole", answers: PlanName = "full"
) -> Costs:
    """Return the expected cost of each stage, for a plan with this form of the graph.

    ``answers`` says whether all members are asked, or those of the set's fast plan. Raises
    :class:`PlanError` if the set has no fast plan.
    """
    if answers == "fast" and (problem := manifest.plan_problem(precision)) is not None:
        raise PlanError(f"--plan fast: {problem}")
    of_members = member_cpu_ms(manifest, precision, answers)
    members = tuple(of_members)
    has = {"decodes": form != "stages", "has_members": form == "whole"}
    cpu_ms = {"Gateway": gateway_cpu_ms(manifest, precision, answers, **has)}
    if form == "stages":
        cpu_ms["Decoder"] = decoder_cpu_ms(manifest)
    if form != "whole":
        cpu_ms |= {name: MEMBER_APART * ms for name, ms in of_members.items()}
    measured = measured_cpu_ms(manifest, precision)
    used = [(name, manifest.member(name).precision_of(precision)) for name in measured]
    records = [
        record
        for record in records_of_networks(manifest)
        if any(runs in record.cpu_ms_per_image.get(name, {}) for name, runs in used)
    ]
    on = f"on {records[-1].cpu}, {records[-1].measured}" if measured else "none: a guess"
    if measured and (guessed := [name for name in members if name not in measured]):
        on += f" (a guess for {', '.join(guessed)})"
    by = ", by its fast plan" if answers == "fast" else ""
    source = f"of {manifest.name}'s members ({precision}{by}) its record, {on}; of the rest, {REST}"
    inside = of_members if form == "whole" else {}
    return Costs(cpu_ms, members, AROUND_CPU_MS, source, inside)


def read_costs(path: Path, members: tuple[str, ...]) -> Costs:
    """Read the CPU time by stage from the last run in a result of ``tandem bench --json``.

    tests/load/results/share.json has the same times at its top level. Raises :class:`PlanError` if
    the result has no such times, or is of other members.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        by_stage = content.get("cpu_ms_by_stage") or content["runs"][-1]["service_cpu_ms_by_stage"]
        of = {str(stage): float(ms) for stage, ms in by_stage.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} has no CPU time by stage ({type(error).__name__}: {error}); make one on a "
            f"machine like your nodes: tandem bench --concurrency 16 --json {path.name}"
        ) from error
    wrong = [f"{stage}: {ms:g} ms" for stage, ms in of.items() if not 0 < ms <= MAX_CPU_MS]  # NaN
    around_ms = sum(of.pop(name, 0.0) for name in AROUND)
    known = {"Gateway", "Decoder", "Combiner", *members}
    is_whole = not set(members) & set(of) or set(members) <= set(of)
    if wrong:
        raise PlanError(
            f"{path} has the stages {', '.join(wrong)} an image; it must be above 0 and at most "
            f"{MAX_CPU_MS:g}: measure again with tandem bench"
        )
    if "Gateway" not in of or not set(of) <= known or not is_whole:
        raise PlanError(
            f"{path} has the stages {', '.join(of) or 'none'}; it needs the Gateway and no others "
            f"than Decoder, Combiner and the set's members ({', '.join(members)}), all or none"
        )
    machine = content.get("machine") or {}
    source = f"{path.name}, on {machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    return Costs(of, members, around_ms, source)


@dataclass(frozen=True)
class PlannedForm:
    """The plan for a form of the graph, or why there is none."""

    form: Form
    costs: Costs
    plan: Plan | None
    why_not: str | None = None

    @property
    def cpu_ms(self) -> float:
        """CPU time of an image in all processes, in ms."""
        return sum(self.costs.cpu_ms.values()) + self.costs.around_ms

    @property
    def alone_ms(self) -> float:
        """Latency of a single image without other load, in ms, with the planned replicas."""
        return (self.plan.costs if self.plan else self.costs).alone_ms


def compare_forms(
    needs: Requirements, manifest: Manifest, answers: PlanName = "full"
) -> list[PlannedForm]:
    """Plan every form of the graph for the same load, each with its expected costs."""
    forms = []
    for form in FORMS:
        costs = planned_costs(manifest, "INT8", form, answers)
        try:
            forms.append(PlannedForm(form, costs, plan(needs, costs)))
        except PlanError as error:
            forms.append(PlannedForm(form, costs, None, str(error)))
    return forms


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the times (s from the start, ascending) of independent arrivals at ``rate`` per s."""
    expected = rate * seconds
    num_drawn = math.ceil(expected + 6 * math.sqrt(expected) + 10)  # enough, except once in 1e9
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_drawn))
    return list(times[times < seconds].tolist())


@dataclass(frozen=True, slots=True)
class SimStage:
    """A stage of the simulated service."""

    cpu_ms: float  # per image
    cores: float  # per replica; as many batches run at a time, at least one
    replicas: int = 1
    max_batch_size: int = 1


@dataclass(frozen=True)
class Service:
    """The stages in an image's order, and the limits of waiting."""

    stages: Mapping[str, SimStage]
    steps: Sequence[Sequence[str]]
    max_under_way: int = 256  # per replica of the first stage; further images are refused
    timeout_s: float = 10.0  # an image that has not been started by then is dropped
    jitter: float = 0.1  # standard deviation of a batch's time, as a share


@dataclass
class SimulationOutcome:
    """The result of a simulation: a latency per answered image."""

    answered: list[tuple[float, float]] = field(default_factory=list)  # (arrival, latency), s
    refused: list[float] = field(default_factory=list)  # arrivals: the queues were full
    late: list[float] = field(default_factory=list)  # arrivals: dropped after timeout_s

    def p99_ms(self, since: float = 0.0, until: float = math.inf) -> float:
        """Return the 99th percentile of latency, in ms, of arrivals in a period; 0 without any."""
        latencies = sorted(latency for at, latency in self.answered if since <= at < until)
        return latencies[math.ceil(0.99 * len(latencies)) - 1] * 1e3 if latencies else 0.0


@dataclass(slots=True, eq=False)
class SimReplica:
    """A replica of the simulation."""

    stage: str
    num_cores: int
    num_busy: int = 0
    batch_images: int = 0
    queue: deque["SimImage"] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class SimImage:
    """An image of the simulation."""

    arrived: float
    step: int = -1
    num_pending: int = 0  # stages of the present step that still work on it
    is_lost: bool = False


class Simulation:
    """A simulation of a service."""

    def __init__(self, service: Service, seed: int = 0) -> None:
        self._service, self._rng = service, random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events, self._now, self._under_way = 0, 0.0, 0
        self.outcome = SimulationOutcome()
        self._replicas = {
            name: [SimReplica(name, max(1, int(stage.cores))) for _ in range(stage.replicas)]
            for name, stage in service.stages.items()
        }

    def run(self, arrivals: Sequence[float]) -> SimulationOutcome:
        """Simulate arrivals (s from the start, ascending) until all are answered.

        Its running time depends on the number of arrivals, not on the simulated time.
        """
        coming = iter([*arrivals, math.inf])
        arrival = next(coming)
        while True:
            event = self._events[0][0] if self._events else math.inf
            self._now = min(arrival, event)
            if self._now == math.inf:
                return self.outcome
            if event <= self._now:
                heapq.heappop(self._events)[-1]()
                continue
            arrival = next(coming)
            fronts = self._replicas[self._service.steps[0][0]]
            if self._under_way >= self._service.max_under_way * len(fronts):
                self.outcome.refused.append(self._now)
                continue
            self._under_way += 1
            self._advance(SimImage(self._now))

    def _advance(self, image: SimImage) -> None:
        image.step += 1
        if image.step == len(self._service.steps):
            self._under_way -= 1
            self.outcome.answered.append((image.arrived, self._now - image.arrived))
            return
        names = self._service.steps[image.step]
        image.num_pending = len(names)
        for name in names:
            drawn = (self._rng.choice(self._replicas[name]) for _ in range(2))
            replica = min(drawn, key=lambda each: len(each.queue) + each.batch_images)
            replica.queue.append(image)
            self._start(replica)

    def _start(self, replica: SimReplica) -> None:
        """Let free cores take waiting images."""
        stage = self._service.stages[replica.stage]
        while replica.queue and replica.num_busy < replica.num_cores:
            batch: list[SimImage] = []
            while replica.queue and len(batch) < stage.max_batch_size:
                image = replica.queue.popleft()
                if self._now - image.arrived > self._service.timeout_s and not image.is_lost:
                    image.is_lost = True
                    self._under_way -= 1
                    self.outcome.late.append(image.arrived)
                if not image.is_lost:
                    batch.append(image)
            if batch:
                replica.num_busy += 1
                replica.batch_images += len(batch)
                drawn = max(0.5, self._rng.gauss(1.0, self._service.jitter))
                ends_s = self._now + len(batch) * stage.cpu_ms * drawn / 1e3
                self._num_events += 1
                finished: Callable[[], None] = partial(self._finished, replica, batch)
                heapq.heappush(self._events, (ends_s, self._num_events, finished))

    def _finished(self, replica: SimReplica, batch: list[SimImage]) -> None:
        replica.num_busy -= 1
        replica.batch_images -= len(batch)
        for image in batch:
            image.num_pending -= 1
            if image.num_pending == 0 and not image.is_lost:
                self._advance(image)
        self._start(replica)
