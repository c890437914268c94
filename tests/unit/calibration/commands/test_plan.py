"""``tandem plan``: what it says, as text and as JSON, and what it refuses."""

import json

from calibration.planning import PlanError
from tests.support.cases import cases
from tests.support.command_line import tandem


def write_costs(path, **by_stage):
    """Write a result of ``tandem bench --json``."""
    path.write_text(json.dumps({"runs": [{"service_cpu_ms_by_stage": by_stage}]}))


def test_the_command_says_what_it_takes_of_which_costs_and_what_it_assumed(tmp_path):
    result = tandem("plan", "--rate", 200, "--p99-ms", 100, "--node-cores", 32)
    assert result.exit_code == 0, result.output
    assert "nodes of 32 cores for 200 requests/s, 400 predictions/s" in result.stdout
    for word in ("record", "SMT", "Poisson", "simulation", "--costs"):
        assert word in result.stdout
    path = tmp_path / "costs[old].json"
    write_costs(path, Gateway=9)
    result = tandem("plan", "--rate", 20, "--costs", path)
    assert result.exit_code == 0, result.output
    assert "costs[old].json" in result.stdout.replace("\n", "")


def test_the_command_as_json():
    result = tandem("plan", "--rate", 100, "--apart", "--survive-nodes", 0, "--json", "-")
    planned = json.loads(result.stdout)
    assert planned["nodes"] == 1
    assert set(planned["stages"]) == {"Gateway", "Decoder", "resnet50", "densenet169"}
    assert len(planned["assumed"]) == 7
    assert any("max_replicas_per_node" in line for line in planned["assumed"])
    together = json.loads(tandem("plan", "--rate", 100, "--json", "-").stdout)
    assert len(together["assumed"]) == 7
    assert not any("max_replicas_per_node" in line for line in together["assumed"])
    assert any("event loop" in line for line in together["assumed"])
    assert set(together["forms"]) == {"whole", "members", "stages"}
    assert together["forms"]["whole"]["nodes"] == together["nodes"]
    assert together["forms"]["stages"]["nodes"] >= together["nodes"]


def test_a_form_that_does_not_fit_says_so_and_measured_costs_are_of_one(tmp_path):
    result = tandem("plan", "--rate", 250, "--node-cores", 4, "--json", "-")
    forms = json.loads(result.stdout)["forms"]
    assert forms["whole"]["nodes"] == 3
    assert forms["stages"]["nodes"] is None
    assert "--node-cores 4" in forms["stages"]["why_not"]
    shown = tandem("plan", "--rate", 250, "--node-cores", 4).stdout
    assert "all stages apart: 250 images/s do not fit" in shown
    path = tmp_path / "costs.json"
    write_costs(path, Gateway=30.0, Ray=1.0, HAProxy=0.5)
    assert json.loads(tandem("plan", "--costs", path, "--json", "-").stdout)["forms"] == {}


@cases(
    "arguments",
    *(("--rate", "0"), ("--p99-ms", "-1"), ("--node-cores", "100000")),
    *(("--survive-nodes", "1000"), ("--apart", "--costs", "x")),
)
def test_the_command_refuses(arguments):
    assert isinstance(tandem("plan", *arguments).exception, PlanError)
