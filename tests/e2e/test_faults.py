"""Nothing that was accepted is lost when a replica dies: real nodes, kills and answers.

tests/load/faults.py has the other faults, and the figures.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from live_service import ROOT

FAULTS = ("member", "gateway")
WITHIN_S = 400


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One cluster for all: its start is what takes time."""
    file: Path = tmp_path_factory.mktemp("faults") / "faults.json"
    chosen = [word for name in FAULTS for word in ("--fault", name)]
    command = [sys.executable, "tests/load/faults.py", *chosen, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text("utf-8"))


@pytest.mark.parametrize("fault", FAULTS)
def test_no_accepted_request_is_lost_and_no_answer_is_wrong(result: dict, fault: str) -> None:
    told = result["faults"][fault]
    assert told["under_way"] >= 4  # it had something to lose
    assert told["lost"] == told["wrong"] == told["refused"] == 0, told
    assert told["right"] == told["accepted"] == told["requests"] > 0


def test_replicas_are_deployed_on_different_nodes(result: dict) -> None:
    """Later, when one was replaced, Serve does not promise it."""
    for deployment, by_node in result["faults"][FAULTS[0]]["placement"].items():
        assert sorted(by_node.values()) == [1, 1], (deployment, by_node)
