"""Replicas on one machine: each has cores of its own, and gives them back however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.compute.cpu_affinity import claim, keep_to_own_cores

HOLD = """
import sys
from pathlib import Path
from app.compute.cpu_affinity import claim
print(claim([(0, 1), (2, 3), (3, 4)], Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that claims a place in the same folder of locks, and says which."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_two_processes_have_different_places_until_one_dies(tmp_path, other):
    assert other.stdout.readline().strip() == "(0, 1)"
    places = [(0, 1), (1, 2), (2, 3)]
    assert claim(places[:2], tmp_path) is None  # CPU 1 is in both
    assert claim(places, tmp_path) == (2, 3)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert claim(places, tmp_path) == (0, 1)


def test_a_claim_that_fails_holds_nothing(tmp_path, other):
    assert other.stdout.readline().strip() == "(0, 1)"
    assert claim([(7, 0)], tmp_path) is None
    assert claim([(7,)], tmp_path) == (7,)  # 7 was let go


def test_the_process_moves_there_and_threads_that_come_later_too(tmp_path):
    script = f"""
import os, threading
from pathlib import Path
from app.compute.cpu_affinity import keep_to_own_cores
place = keep_to_own_cores(1, Path({str(tmp_path)!r}))
assert os.sched_getaffinity(0) == set(place), place
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
assert seen == [set(place)], seen
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_more_than_the_machine_has_is_told_and_changes_nothing(tmp_path, caplog):
    before = os.sched_getaffinity(0)
    assert keep_to_own_cores(10_000, tmp_path) is None
    assert os.sched_getaffinity(0) == before
    assert "give fewer replicas, or a smaller num_cpus" in caplog.text
