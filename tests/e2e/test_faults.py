"""Nothing that was accepted is lost when a replica dies: real nodes, kills and answers.

tests/load/faults.py has the other faults, and the figures.

In the fast tier, on one node: tests/integration/test_failures.py kills a member,
test_member_faults.py breaks one and test_silent_replica.py lets one hang; what the callers of a
lost replica do is in tests/unit/calls and tests/unit/graph.
"""

import json
import subprocess
import sys

import pytest

from tests.support.services.live_service import ROOT
from tests.support.services.network import why_not

pytestmark = pytest.mark.slow
FAULTS = ("member", "gateway")
WITHIN_S = 400


def strike(folder, *faults, script="faults", option="--fault"):
    """Return what a cluster of its own says of these faults."""
    file = folder / "faults.json"
    chosen = [word for name in faults for word in (option, name)]
    command = [sys.executable, f"tests/load/{script}.py", *chosen, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text("utf-8"))


def check_that_nothing_is_lost(told: dict) -> None:
    assert told["under_way"] >= 4  # it had something to lose
    assert told["lost"] == told["wrong"] == told["refused"] == 0, told
    assert told["right"] == told["accepted"] == told["requests"] > 0


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """One cluster for all: its start is what takes time."""
    return strike(tmp_path_factory.mktemp("faults"), *FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_accepted_request_is_lost_and_no_answer_is_wrong(result, fault):
    check_that_nothing_is_lost(result["faults"][fault])


@pytest.mark.redis
def test_a_head_comes_back_to_its_state_in_redis(tmp_path):
    """A cluster of its own, whose head keeps its state in a redis-server of ours."""
    told = strike(tmp_path, "head")["faults"]["head"]
    check_that_nothing_is_lost(told)
    replicas = sum(sum(by_node.values()) for by_node in told["placement"].values())
    assert told["replicas_kept"] == replicas  # none was started anew for it


@pytest.mark.skipif((reason := why_not()) is not None, reason=str(reason))
def test_no_request_is_lost_on_a_node_that_is_cut_off_behind_the_balancer(tmp_path):
    told = strike(tmp_path, "cut-5", script="network_faults", option="--row")["rows"]["cut-5"]
    assert told["lost"] == told["wrong"] == told["refused"] == 0, told
    assert told["right"] == told["requests"] > 0
    assert told["sent_to_it_for_s"] < 4.5, told


@pytest.mark.parametrize("fault", FAULTS)
def test_every_stage_is_on_both_nodes(result, fault):
    """Also when a replica has been replaced: what comes next may be a node's death."""
    for deployment, by_node in result["faults"][fault]["placement"].items():
        assert len(by_node) == 2, (deployment, by_node)
