"""An unloaded set's memory goes back to the system, and comes back no larger."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_networks import write_tiny_set


@pytest.mark.slow
def test_most_of_what_a_set_took_is_given_back_each_time(tmp_path: Path) -> None:
    """Of the bundled set, whose networks take hundreds of MB, beside a tiny one that stays.

    In make test ``test_set_stages`` covers that nothing keeps the networks.
    """
    default = write_tiny_set(tmp_path / "tiny")
    program = [sys.executable, "-m", "tests.support.unloaded_memory", str(default), "imagenette"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    pss_mb = json.loads(done.stdout.splitlines()[-1])
    taken = [loaded - pss_mb["unloaded"][0] for loaded in pss_mb["loaded"]]
    assert min(taken) > 50, pss_mb  # else there is nothing to show
    for loaded, unloaded in zip(pss_mb["loaded"], pss_mb["unloaded"], strict=True):
        assert unloaded - pss_mb["unloaded"][0] < 0.4 * taken[0], pss_mb
        assert loaded < pss_mb["loaded"][0] + 0.4 * taken[0], pss_mb
