"""Replicas in processes of their own: real ones on a tiny set, and some that die."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from app.compute.cpu_affinity import Core
from app.compute.group_limits import free_memory
from app.deployments.assembly import assemble
from app.errors import ConfigError
from app.settings import Settings
from app.tune import trials as module
from app.tune.candidates import Candidate, ReplicaLayout, candidates
from app.tune.replica import LoadMeasured, LoadRequest, closed_loops
from app.tune.trials import ReplicaProcess, Trials, cores_of
from tests.support import replica_children
from tests.support.cgroup_files import CgroupFiles
from tests.support.tiny_networks import picture

LOAD = LoadRequest(1, 0.05, 1)


def child(run) -> ReplicaProcess:
    return ReplicaProcess(Settings(), sorted(os.sched_getaffinity(0)), Path("photos"), run)


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Of this process, since the test began."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def told(run, *, is_loaded: bool = False) -> str:
    replica = child(run)
    try:
        with pytest.raises(ConfigError) as caught:  # noqa: PT012
            replica.wait_ready()
            assert is_loaded
            replica.send(LOAD)
            replica.measured(LOAD)
    finally:
        replica.end()
    return str(caught.value)


@pytest.mark.slow  # make test has the one that fails, below
def test_a_replica_that_is_killed():
    assert "SIGKILL: memory ran out, most likely" in told(replica_children.dies_at_start)
    assert "SIGKILL" in told(replica_children.dies_when_loaded, is_loaded=True)


def test_a_replica_that_ends_or_fails():
    assert "exit code 3" in told(replica_children.exits_at_start)
    assert "no such network" in told(replica_children.fails)


def test_a_replica_that_hangs(new_children, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.2)
    assert "said nothing for 0.2 s" in told(replica_children.hangs)
    assert new_children() == []


def test_the_limits_of_a_service_refuse_no_client_of_the_search():
    """16 clients a core are more than 128 from nine cores on."""
    settings = Settings(max_concurrent_requests=1)
    with Trials(settings, [picture()]) as trials:
        own = trials._settings
    assert own.max_concurrent_requests > 16 * 1024
    assert own.target_wait_ms is None


def test_a_replica_without_its_set(new_children, tmp_path):
    settings = Settings(model_set=str(tmp_path))
    with Trials(settings, [picture()]) as trials, pytest.raises(ConfigError, match="no model set"):
        trials.measure(Candidate(ReplicaLayout(1, 1, 1), (1,)), 1, 0.05)
    assert new_children() == []


@pytest.fixture
def settings(tiny_set, tmp_path) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=tmp_path / "cache")


async def test_clients_send_the_photos_and_every_answer_counts(settings):
    graph = assemble(settings)
    answered = await closed_loops(graph, [picture("red"), picture("blue")], LoadRequest(3, 0.1, 2))
    assert answered.throughput > 0
    assert len(answered.latencies_ms) >= 3
    assert min(answered.latencies_ms) > 0


async def test_a_photo_that_is_none(settings):
    with pytest.raises(ConfigError, match="could not be classified"):
        await closed_loops(assemble(settings), [b"text"], LoadRequest(1, 0.05, 1))


def test_a_run_on_one_replica_and_another_on_its_process(new_children, settings, monkeypatch):
    said: list[str] = []
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {core})
    with Trials(settings, [picture()], said.append) as trials:
        for sizes in ((1,), (1, 2, 4)):
            sample = trials.measure(Candidate(ReplicaLayout(1, 1, 1), sizes), 4, 0.05)
            assert 0 < sample.p50_ms <= sample.p99_ms
            assert sample.throughput > 0
        (running,) = new_children()
        assert running.cpu_affinity() == [core]
    assert len(said) == 1
    assert new_children() == []


class Fake:
    """A replica that only counts."""

    running = 0
    asked: ClassVar[list[tuple[tuple[int, ...], int]]] = []  # compiled sizes, largest to form

    def __init__(self, settings: Settings, *_: object) -> None:
        Fake.running += 1
        self._compiled = settings.batch_sizes

    def wait_ready(self) -> int:
        return 100 * 2**20

    def send(self, load: LoadRequest) -> None:
        self.load = load
        Fake.asked.append((self._compiled, load.max_batch_size))

    def measured(self, load: LoadRequest) -> LoadMeasured:
        assert load == self.load
        return LoadMeasured(10.0 * load.clients, [float(load.clients)])

    def end(self) -> None:
        Fake.running -= 1


MANY_CORES = [Core(0, 0, (number,)) for number in range(32)]


@pytest.fixture
def fake_replicas(monkeypatch):
    monkeypatch.setattr(module, "ReplicaProcess", Fake)
    monkeypatch.setattr(module, "read_cores", lambda: MANY_CORES)
    monkeypatch.setattr(Fake, "running", 0)
    monkeypatch.setattr(Fake, "asked", [])

    def with_memory(mib: int) -> None:
        monkeypatch.setattr(module, "free_memory", lambda: (mib - Fake.running * 100) * 2**20)

    return with_memory


@pytest.mark.parametrize("cores", [1, 2, 12, 32])
def test_the_batch_sizes_that_are_measured_are_those_that_are_written(fake_replicas, cores):
    """A queue forms every compiled size up to the largest that it is allowed."""
    fake_replicas(100_000)
    tried = candidates(cores)
    with Trials(Settings(), []) as trials:
        for candidate in tried:
            assert trials.measure(candidate, 1, 1.0)
    formed = [tuple(n for n in compiled if n <= largest) for compiled, largest in Fake.asked]
    assert formed == [candidate.batch_sizes for candidate in tried]


def test_clients_are_shared_out_and_replicas_added_up(fake_replicas):
    fake_replicas(10_000)
    with Trials(Settings(), []) as trials:
        five = trials.measure(Candidate(ReplicaLayout(2, 1, 1), (1,)), 5, 1.0)
        assert (five.throughput, five.p50_ms, five.p99_ms) == (50.0, 2.5, 2.99)
        one = trials.measure(Candidate(ReplicaLayout(2, 1, 1), (1,)), 1, 1.0)
        assert (one.throughput, one.p99_ms) == (10.0, 1.0)
        assert Fake.running == 2
    assert Fake.running == 0


def test_replicas_stay_while_there_is_memory_and_go_when_there_is_not(fake_replicas):
    one, other, eight = (Candidate(ReplicaLayout(n, 8 // n, 1), (1,)) for n in (1, 2, 8))
    fake_replicas(10_000)
    with Trials(Settings(), []) as trials:
        assert trials.measure(one, 1, 1.0)
        assert trials.measure(other, 1, 1.0)
        assert Fake.running == 3
        fake_replicas(1500)  # room for eight of 115 MiB and the reserve, and not for the three
        assert trials.measure(eight, 1, 1.0)
        assert Fake.running == 8
        fake_replicas(900)
        assert trials.measure(
            Candidate(ReplicaLayout(8, 1, 1), (1,)), 1, 1.0
        )  # it runs: no question
        assert trials.measure(one, 1, 1.0)
        assert Fake.running == 1
        assert trials.measure(eight, 1, 1.0) is None
    assert Fake.running == 0


def test_the_memory_of_the_container_counts(fake_replicas, monkeypatch, tmp_path):
    made = CgroupFiles(tmp_path)
    made.mount_v2("/pod")
    made.set("v2", "/pod", memory__max=1000 * 2**20, memory__current=0, memory__stat="")
    monkeypatch.setattr(free_memory, "__defaults__", (made.proc,))
    with Trials(Settings(), []) as trials:
        assert trials.measure(Candidate(ReplicaLayout(2, 1, 1), (1,)), 1, 1.0) is None
        assert trials.measure(Candidate(ReplicaLayout(1, 2, 1), (1,)), 1, 1.0)


# Two sockets of two cores with two threads; CPU n and n + 4 are one core, as on a Xeon.
SMT = [Core(n // 2, n // 2, (n, n + 4)) for n in range(4)]


@pytest.mark.parametrize(
    ("layout", "cpus"),
    [
        (ReplicaLayout(1, 8, 1), [(0, 1, 2, 3, 4, 5, 6, 7)]),  # is not pinned
        (ReplicaLayout(2, 4, 1), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (ReplicaLayout(4, 2, 1), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (ReplicaLayout(8, 1, 1), []),  # two of them would share a core
        (ReplicaLayout(2, 5, 1), []),  # nor does one span both sockets
    ],
)
def test_a_replica_is_measured_on_the_cores_that_it_is_served_on(layout, cpus):
    assert cores_of(layout, SMT) == cpus


@pytest.mark.parametrize(
    ("layout", "cpus"),
    [
        (ReplicaLayout(1, 6, 1), [tuple(range(64))]),  # the quota limits its threads, no CPU list
        (ReplicaLayout(6, 1, 1), [(n,) for n in range(6)]),
        (ReplicaLayout(2, 3, 1), [(0, 1, 32), (2, 3, 34)]),
        (ReplicaLayout(3, 2, 1), [(0, 32), (1, 33), (2, 34)]),
    ],
)
def test_a_replica_under_a_quota_has_as_many_threads_as_served(layout, cpus):
    """A quota of 6 CPUs on 32 cores of two threads; replicas size their threads by their CPUs."""
    assert cores_of(layout, [Core(0, 0, (n, n + 32)) for n in range(32)]) == cpus


def test_a_layout_whose_replicas_would_share_cores_is_left_out(fake_replicas, monkeypatch):
    fake_replicas(10_000)
    monkeypatch.setattr(module, "read_cores", lambda: SMT)
    with Trials(Settings(), []) as trials:
        assert trials.measure(Candidate(ReplicaLayout(8, 1, 1), (1,)), 1, 1.0) is None
        assert trials.measure(Candidate(ReplicaLayout(4, 2, 1), (1,)), 1, 1.0)
        assert trials.why_left_out(ReplicaLayout(8, 1, 1)) == (
            "for lack of cores of its own for each replica"
        )
        assert trials.why_left_out(ReplicaLayout(4, 2, 1)) == "for lack of memory"
