"""``tandem bench`` with the real command against the real service.

In the fast tier: tests/unit/cli/test_bench.py.
"""

import json
import signal
import subprocess

import psutil
import pytest

from tests.support.services.live_service import TANDEM, run_tandem
from tests.support.services.processes import still_running, title

pytestmark = pytest.mark.slow


def test_load_on_the_service_is_told_with_its_cost(service):
    arguments = ["--concurrency", "2", "--rate", "5", "--duration", "3", "--warm-up", "1"]
    result = json.loads(run_tandem("bench", "--url", service.url, *arguments, "--json", "-").stdout)
    assert result["model_set"] == "imagenette"
    closed, opened = result["runs"]
    for run in (closed, opened):
        assert run["num_ok"] == run["num_requests"] > 0
        assert run["errors"] == {}
        assert run["service_cpu_ms"] > 1  # two networks and a decoder cost more than that
        assert run["p50_ms"] <= run["p90_ms"] <= run["p99_ms"] <= run["max_ms"]


def test_ctrl_c_ends_the_load_generator_as_well(service):
    arguments = ["--concurrency", "1", "--duration", "60", "--warm-up", "0"]
    with subprocess.Popen(
        [TANDEM, "bench", "--url", service.url, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as running:
        parent = psutil.Process(running.pid)
        while not any("models.child_process" in title(child) for child in parent.children()):
            assert running.poll() is None
        everything = [parent, *parent.children(recursive=True)]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) != 0
    assert still_running(everything) == []
