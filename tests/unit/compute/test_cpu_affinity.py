"""Replicas on one machine: each has cores of its own, and gives them back however it ends."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
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


def test_two_that_claim_at_once_both_get_a_place(tmp_path, monkeypatch):
    """The second comes while the first has one CPU of its place, and takes the other one.

    The order is forced: the first goes on when the second holds a lock, or waits for one.
    """
    lock, second_is_there, first_is_done = fcntl.flock, threading.Event(), threading.Event()

    def flock(descriptor: int, operation: int) -> None:
        is_second = threading.current_thread() is second
        if is_second and not operation & fcntl.LOCK_NB:
            second_is_there.set()
        lock(descriptor, operation)
        if not operation & fcntl.LOCK_NB:
            return
        if is_second:
            second_is_there.set()
            assert first_is_done.wait(60)
        elif not second.ident:
            second.start()
            assert second_is_there.wait(60)

    places, claimed = [(0, 1), (2, 3)], []
    second = threading.Thread(target=lambda: claimed.append(claim(places, tmp_path)))
    monkeypatch.setattr(fcntl, "flock", flock)
    claimed.append(claim(places, tmp_path))
    first_is_done.set()
    second.join()
    assert claimed == places


def test_many_processes_at_once_leave_no_place_unused(tmp_path):
    places = [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(5)]
    script = f"""
import signal, sys
from pathlib import Path
from app.compute.cpu_affinity import claim
print("ready", flush=True)
sys.stdin.read()  # until all are there
print(claim({places}, Path({str(tmp_path)!r})), flush=True)
signal.pause()  # nobody gives a place back before all have claimed
"""
    start, gate = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=start, stdout=subprocess.PIPE, text=True
        )
        for _ in places
    ]
    os.close(start)
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(places)
    os.close(gate)
    claimed = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    assert sorted(claimed) == sorted(map(str, places))


def test_threads_that_end_and_start_meanwhile(tmp_path):
    """Libraries have threads of their own, which come and go while the process is moved."""
    script = f"""
import os, threading
from pathlib import Path
from app.compute.cpu_affinity import keep_to_own_cores

TASKS = Path("/proc/self/task")
end, never = threading.Event(), threading.Event()
short = threading.Thread(target=end.wait)
late = threading.Thread(target=never.wait, daemon=True)
short.start()
move = os.sched_setaffinity

def moving(task, cpus):  # the threads are listed by now
    if not end.is_set():
        late.start()
        end.set()
        short.join()
        while (TASKS / str(short.native_id)).exists():
            pass
    move(task, cpus)

os.sched_setaffinity = moving
place = keep_to_own_cores(1, Path({str(tmp_path)!r}))
masks = {{task.name: os.sched_getaffinity(int(task.name)) for task in TASKS.iterdir()}}
assert str(late.native_id) in masks
assert set(map(frozenset, masks.values())) == {{frozenset(place)}}, masks
"""
    subprocess.run([sys.executable, "-c", script], check=True)


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


def test_a_system_that_keeps_no_process_to_cores(tmp_path, caplog, monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    assert keep_to_own_cores(1, tmp_path) is None
    assert "affinity: this system keeps no process to cores" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_locks_that_cannot_be_opened_keep_no_replica_from_starting(tmp_path, caplog):
    """The folder's name is known, and another account may have taken it."""
    (tmp_path / "locks").write_text("not a folder")
    before = os.sched_getaffinity(0)
    assert keep_to_own_cores(1, tmp_path / "locks") is None
    assert os.sched_getaffinity(0) == before
    assert "affinity: no place can be locked: [Errno 17] File exists" in caplog.text
