"""Capacity planning: the fewest nodes that handle an arrival rate within a p99.

Each node gets the same replicas. They are sized for the nodes that are left after failures. The p99
is simulated on those (:mod:`calibration.planning.simulator`), with Poisson arrivals. The simulated
images and replicas are bounded, and so are its time and memory, for any load.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from calibration.planning.simulator import Service, SimStage, Simulation, poisson_arrivals
from models.errors import TandemError

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
            return self._cores_together
        return min(self.replica_cores, CORES_APART.get(stage, self.replica_cores))

    @property
    def _cores_together(self) -> float:
        """The cores that an event loop can keep busy: fewer if the networks are cheaper."""
        kept_busy = SERIAL_BUSY * self.cpu_ms["Gateway"] / SERIAL_CPU_MS
        return float(max(1, min(self.replica_cores, math.floor(kept_busy))))

    @property
    def alone_ms(self) -> float:
        """Latency of a single image without other load, in ms, with its members in parallel."""
        in_turn = sum(max(self.cpu_ms[name] for name in step) for step in self.steps)
        if self.member_ms and self.cores("Gateway") > 1:
            in_turn -= sum(self.member_ms.values()) - max(self.member_ms.values())
        return HTTP_MS + in_turn


LIMITS = {  # of Requirements: the option, the lowest and the highest value, its unit
    "rate": ("--rate", 0.001, 1e5, "images/s"),
    "p99_ms": ("--p99-ms", 0.001, 1e5, "ms"),
    "node_cores": ("--node-cores", 1, 1024, "cores"),
    "survive_nodes": ("--survive-nodes", 0, 100, "nodes"),
}


@dataclass(frozen=True)
class Requirements:
    """The requirements on the service.

    Raises:
        PlanError: a value is outside of ``LIMITS``.

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

    Raises:
        PlanError: no number of nodes does.

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
            return Plan(
                every,
                per_node,
                sized,
                _utilization(needs.rate, every, per_node, sized),
                _utilization(needs.rate, nodes, per_node, sized),
                p99_ms,
            )
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
    heavy = {"Gateway"} if costs.is_together else set(costs.members)
    stages = {
        name: SimStage(
            ms,
            costs.cores(name),
            per_node[name] * nodes,
            MAX_BATCH_SIZE if name in heavy else 1,
        )
        for name, ms in costs.cpu_ms.items()
    }
    wanted_s = WARM_UP_S + max(COUNTED_S, COUNTED_IMAGES / rate)
    seconds = min(wanted_s, MAX_SIMULATED_IMAGES / rate)
    arrivals = poisson_arrivals(rate, seconds, seed)
    outcome = Simulation(Service(stages, costs.steps), seed).run(arrivals)
    if outcome.refused or outcome.late:
        return math.inf
    return HTTP_MS + outcome.p99_ms(since=min(WARM_UP_S, seconds / 4))
