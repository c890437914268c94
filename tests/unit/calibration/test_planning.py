"""Planned capacity: enough of it, not more than it takes, and nothing assumed in silence."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.planning import (
    SERIAL_BUSY,
    SERIAL_CPU_MS,
    Costs,
    Form,
    PlanError,
    Requirements,
    Simulation,
    plan,
    planned_costs,
    read_costs,
)
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.tiny_networks import write_tiny_set

APART = Costs(
    {"Gateway": 6.0, "Decoder": 5.0, "one": 20.0, "other": 15.0}, ("one", "other"), 4.0, "test"
)
TOGETHER = Costs({"Gateway": 34.0}, ("one", "other"), 1.4, "test")
WISH = Requirements(rate=200, p99_ms=100, node_cores=16, survive_nodes=1)
RESULTS = Path(__file__).parents[2] / "load" / "results"


@pytest.mark.parametrize("costs", [APART, TOGETHER], ids=["apart", "together"])
def test_what_is_left_when_nodes_die_carries_the_load(costs):
    planned = plan(WISH, costs)
    left = planned.nodes - WISH.survive_nodes
    for name, ms in costs.cpu_ms.items():
        capacity = planned.replicas_per_node[name] * left * planned.costs.cores(name) * 1e3 / ms
        assert planned.utilization_survived[name] == pytest.approx(WISH.rate / capacity)
        assert planned.utilization_survived[name] <= 0.7
    per_node = planned.replicas_per_node
    taken = sum(per_node[name] * planned.costs.cores(name) for name in costs.cpu_ms)
    assert taken <= WISH.node_cores - 1
    assert costs.alone_ms < planned.p99_ms <= WISH.p99_ms


def test_as_few_nodes_as_do():
    """10.2 cores at 0.7 busy fit a node of 16: one carries it, and one is spare."""
    assert plan(WISH, TOGETHER).nodes == 2
    assert plan(replace(WISH, survive_nodes=0), TOGETHER).nodes == 1
    assert plan(replace(WISH, survive_nodes=0, rate=400), TOGETHER).nodes == 2


@pytest.mark.parametrize(("cores", "replicas", "of"), [(4, 1, 3), (2, 1, 1), (5, 1, 4)])
def test_small_nodes_have_smaller_replicas(cores, replicas, of):
    wish = Requirements(rate=cores * 12, p99_ms=500, node_cores=cores, survive_nodes=0)
    planned = plan(wish, TOGETHER)
    assert planned.replicas_per_node == {"Gateway": replicas}
    assert planned.costs.cores("Gateway") == of


def test_a_small_load_fits_small_nodes():
    for cores in (2, 4, 6):
        assert plan(Requirements(20, 500, cores, survive_nodes=1), TOGETHER).nodes <= 3


@pytest.mark.parametrize("cores", [4, 6, 8, 12, 16, 24, 32, 64])
def test_nodes_are_used(cores):
    """All cores but those of Ray and HAProxy, and fewer than one small replica, have work."""
    planned = plan(Requirements(cores * 200, 500, cores, survive_nodes=0), TOGETHER)
    taken = planned.replicas_per_node["Gateway"] * planned.costs.cores("Gateway")
    assert taken >= 0.75 * (cores - 1)
    assert planned.nodes <= math.ceil(cores * 200 * (34.0 + 1.4) / 1e3 / 0.7 / (0.75 * (cores - 1)))


def test_apart_fits_nodes_of_eight_cores_and_a_tighter_p99_takes_more():
    planned = plan(Requirements(20, 500, 8, survive_nodes=0), APART)
    assert (planned.nodes, planned.costs.cores("one")) == (1, 2)
    loose = plan(replace(WISH, p99_ms=500), TOGETHER)
    tight = plan(replace(WISH, p99_ms=50), TOGETHER)
    assert tight.p99_ms <= 50
    assert tight.nodes > loose.nodes
    assert tight.utilization_survived["Gateway"] < loose.utilization_survived["Gateway"]


@cases(
    "changes, says",
    ({"p99_ms": 30}, "one image alone takes 36.8 ms"),
    ({"p99_ms": 38.3}, "a p99 of 38.3 ms is not kept even by"),
    ({"node_cores": 1}, "--node-cores 1: Ray and HAProxy take one core or more"),
)
def test_what_cannot_be_is_said(changes, says):
    with pytest.raises(PlanError, match=says):
        plan(replace(WISH, **changes), TOGETHER)


class Bounded(Simulation):
    """Asserts what a plan's simulation may take; time and memory follow from it."""

    def run(self, arrivals):
        assert 10_000 < len(arrivals) < 110_000
        assert sum(map(len, self._replicas.values())) < 2000
        return super().run(arrivals)


@pytest.mark.parametrize("costs", [APART, TOGETHER], ids=["apart", "together"])
@cases(
    "changes",
    {"rate": 0.001},
    {"rate": 1e5},
    {"rate": 1e5, "node_cores": 1024},
    {"p99_ms": 1e5},
    {"survive_nodes": 100},
    ids=str,
)
def test_extreme_wishes_take_no_longer(monkeypatch, changes, costs):
    monkeypatch.setattr("calibration.planning.Simulation", Bounded)
    wish = replace(WISH, **changes)
    planned = plan(wish, costs)
    assert planned.nodes > wish.survive_nodes
    assert max(planned.utilization_survived.values()) <= 0.7


def test_a_part_of_many_nodes_waits_as_long_as_all_do(monkeypatch):
    """Or a little longer: the plan is then on the safe side."""
    wish = replace(WISH, rate=20_000)
    part = plan(wish, TOGETHER)
    monkeypatch.setattr("calibration.planning.SIMULATED_RATE", 1e9)
    whole = plan(wish, TOGETHER)
    assert part.nodes == whole.nodes
    assert whole.p99_ms < part.p99_ms < 1.1 * whole.p99_ms


@cases(
    "changes, says",
    ({"rate": 1e-6}, "--rate is 1e-06; it must be from 0.001 to 100000 images/s"),
    ({"rate": 1e9}, "--rate is 1000000000"),
    ({"rate": math.nan}, "--rate is nan"),
    ({"p99_ms": 1e9}, "--p99-ms is 1000000000"),
    ({"p99_ms": 0.0}, "--p99-ms is 0"),
    ({"node_cores": 0}, "--node-cores is 0; it must be from 1 to 1024 cores"),
    ({"node_cores": 100_000}, "--node-cores is 100000"),
    ({"survive_nodes": -1}, "--survive-nodes is -1; it must be from 0 to 100 nodes"),
    ({"survive_nodes": 1000}, "--survive-nodes is 1000"),
    ids=str,
)
def test_a_wish_without_sense_is_refused(changes, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        replace(WISH, **changes)


def test_costs_of_the_bundled_set_come_from_its_record():
    manifest = load_model_set("imagenette").manifest
    recorded = manifest.accuracy[-1].cpu_ms_per_image
    together, apart = (planned_costs(manifest, "INT8", form) for form in ("whole", "stages"))
    members = sum(of["INT8"] for of in recorded.values())
    assert members < together.cpu_ms["Gateway"] < members + 10
    assert together.is_together
    assert not apart.is_together
    assert apart.steps == (("Gateway",), ("Decoder",), ("resnet50", "densenet169"))
    assert str(manifest.accuracy[-1].measured) in together.source


def test_costs_are_the_networks_and_a_guess_where_never_measured(tmp_path):
    manifest = load_model_set("imagenette").manifest
    renamed = manifest.labels.model_copy(update={"sha256": "0" * 64})
    changed = manifest.model_copy(update={"labels": renamed})
    assert planned_costs(changed, "INT8", "stages") == planned_costs(manifest, "INT8", "stages")
    manifest = load_model_set(str(write_tiny_set(tmp_path / "tiny"))).manifest
    assert "none: a guess" in planned_costs(manifest, "INT8", "stages").source


def bench_result(**by_stage):
    return {
        "machine": {"cpu": "Some CPU", "cores": 8},
        "runs": [{"service_cpu_ms_by_stage": by_stage}],
    }


def test_costs_from_a_bench(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(bench_result(Gateway=30.0, Ray=1.0, HAProxy=0.5)))
    assert read_costs(path, ("one", "other")) == Costs(
        {"Gateway": 30.0}, ("one", "other"), 1.5, "costs.json, on Some CPU, 8 cores"
    )


def test_costs_from_the_projects_own_measurement():
    costs = read_costs(RESULTS / "share.json", ("resnet50", "densenet169"))
    assert costs.is_together
    # What the networks cost on that CPU and the constants beside it say the same within a tenth.
    manifest = load_model_set("imagenette").manifest
    there = {"resnet50": {"INT8": 14.54}, "densenet169": {"INT8": 13.17}}
    record = manifest.accuracy[-1].model_copy(update={"cpu_ms_per_image": there})
    expected = planned_costs(manifest.model_copy(update={"accuracy": (record,)}), "INT8")
    assert costs.cpu_ms["Gateway"] == pytest.approx(expected.cpu_ms["Gateway"], rel=0.1)


def test_what_is_expected_beside_the_networks_was_measured():
    measured = json.loads((RESULTS / "apart.json").read_text())["apart"]["median"]["16"]
    manifest = load_model_set("imagenette").manifest
    contestants: dict[Form, str] = {"whole": "tandem", "members": "members", "stages": "apart"}
    for form, contestant in contestants.items():
        costs = planned_costs(manifest, "INT8", form)
        by_process = measured[contestant]["by_process"]
        around_ms = by_process["Ray"] + by_process["HAProxy"]
        assert costs.around_ms == pytest.approx(around_ms, rel=0.2), form
        if form != "whole":
            assert costs.cpu_ms["Gateway"] == pytest.approx(by_process["Gateway"], rel=0.2), form
    decoder_ms = measured["apart"]["by_process"]["Decoder"]
    assert costs.cpu_ms["Decoder"] == pytest.approx(decoder_ms, rel=0.2)


@cases(
    "content, says",
    ("no JSON", "has no CPU time by stage"),
    ("[]", "has no CPU time by stage"),
    ('{"runs": []}', "tandem bench --concurrency 16 --json costs.json"),
    (json.dumps(bench_result()), "has the stages none"),
    (json.dumps(bench_result(Gateway=1, one=2)), "all or none"),
    (json.dumps(bench_result(Gateway=1, cats=2)), "cats"),
    (json.dumps(bench_result(Gateway=0)), "has the stages Gateway"),
    (json.dumps(bench_result(Gateway=float("nan"))), "Gateway: nan ms"),
    (json.dumps(bench_result(Gateway=float("inf"))), "Gateway: inf ms"),
    (json.dumps(bench_result(Gateway=9, Ray=-1, HAProxy=2e6)), "Ray: -1 ms, HAProxy: 2e"),
)
def test_a_file_without_costs_is_refused(tmp_path, content, says):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=says):
        read_costs(path, ("one", "other"))


def test_a_process_uses_cores_for_members_and_fewer_the_cheaper_they_are():
    known = replace(TOGETHER, member_ms={"one": 20.0, "other": 10.0})
    assert known.alone_ms == pytest.approx(TOGETHER.alone_ms - 10.0)
    assert replace(known, cpu_ms={"Gateway": 2.0}).cores("Gateway") == 1

    def cores(ms: float) -> float:
        return replace(TOGETHER, cpu_ms={"Gateway": ms}).cores("Gateway")

    assert [cores(ms) for ms in (34.0, 10.0, 5.0, 3.0, 2.0)] == [4, 4, 3, 2, 1]
    for ms in (34.0, 10.0, 5.0, 3.0, 2.0):  # the loop is never busier than planned
        assert cores(ms) / ms * SERIAL_CPU_MS <= SERIAL_BUSY


def test_a_cost_that_was_not_measured_is_called_a_guess():
    manifest = load_model_set("imagenette").manifest
    record = manifest.accuracy[-1]
    floats = {name: {"FP16": of["FP16"]} for name, of in record.cpu_ms_per_image.items()}

    def source(costs: dict) -> str:
        records = (record.model_copy(update={"cpu_ms_per_image": costs}),)
        changed = manifest.model_copy(update={"accuracy": records})
        return planned_costs(changed, "INT8", "stages").source

    assert "none: a guess" in source(floats)
    half = floats | {"resnet50": record.cpu_ms_per_image["resnet50"]}
    assert "(a guess for densenet169)" in source(half)
    assert "guess" not in source(dict(record.cpu_ms_per_image))
