"""Threads of the networks, their health, and the memory that a process may take."""

import asyncio
import math
import threading
from types import SimpleNamespace

import psutil
import pytest

from app.errors import UnhealthyError
from app.settings import Settings
from app.stages.threads import (
    MAX_FAILURES,
    MAX_RUN_S,
    Health,
    InferenceThreads,
    Limit,
    free_memory,
    inference_threads_for,
    memory_left,
    on_own_thread,
    replica_inference_threads,
    tightest_pids_limit,
    user_limit,
)
from models.machine import cpu_quota
from tests.support.cases import cases
from tests.support.cgroup_files import CgroupFiles

MIB = 2**20
UNLIMITED_V1 = 2**63 - 4096  # version 1's word for no limit of memory
STREAMS = Settings().streams


@pytest.fixture
def files(tmp_path):
    return CgroupFiles(tmp_path)


def test_without_groups_there_is_no_limit(tmp_path, files):
    for proc in (files.proc, tmp_path / "none"):
        assert (cpu_quota(proc), memory_left(proc)) == (math.inf, math.inf)
        assert tightest_pids_limit(proc) == Limit(math.inf, 0)


def test_a_container_sees_its_own_group_as_the_root(files):
    files.mount_v2("/")
    files.set("v2", "/", cpu__max="150000 100000", memory__max=100 * MIB, memory__current=60 * MIB)
    assert (cpu_quota(files.proc), memory_left(files.proc)) == (1.5, 40 * MIB)


@pytest.mark.parametrize("tight", ["/", "/system.slice", "/system.slice/tandem.service"])
def test_the_tightest_of_nested_groups_counts(files, tight):
    files.mount_v2("/system.slice/tandem.service")
    for group in ("/system.slice", "/system.slice/tandem.service"):
        files.set("v2", group, cpu__max="max 100000", memory__max="max", memory__current=1)
    files.set("v2", tight, cpu__max="100000 100000", memory__max=10 * MIB, memory__current=MIB)
    files.set("v2", "/other.slice", cpu__max="1000 100000", memory__max=1, memory__current=1)
    assert (cpu_quota(files.proc), memory_left(files.proc)) == (1, 9 * MIB)


def test_version_1(files):
    files.mount_v1("cpu,cpuacct", "/docker/ab")
    files.mount_v1("memory", "/docker/ab")
    files.mount_v1("cpuset", "/")
    files.mount_v2("/")  # both at once, as systemd's hybrid has it
    files.set("cpu,cpuacct", "/docker", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    files.set("cpu,cpuacct", "/docker/ab", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    files.set("memory", "/", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=900 * MIB)
    files.set(
        "memory",
        "/docker/ab",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=80 * MIB,
        memory__stat=f"inactive_file 1\nactive_file 7\ntotal_inactive_file {30 * MIB}",
    )
    assert (cpu_quota(files.proc), memory_left(files.proc)) == (2.5, 50 * MIB)


def test_a_mount_that_begins_at_the_containers_group(files):
    """Docker's way without a namespace of groups: what is mounted is the group itself."""
    files.mount_v1("cpu", "/docker/ab/inner", root="/docker/ab")
    files.set("cpu", "/inner", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert cpu_quota(files.proc) == 0.5


def test_groups_that_are_not_below_the_mount_are_left_out(files):
    files.mount_v2("/../outside")
    files.set("v2", "/", cpu__max="300000 100000")
    assert cpu_quota(files.proc) == 3


@pytest.mark.parametrize("content", ["", "200000", "many 100000", "1 2 3", "100000 0"])
def test_what_is_no_quota_is_none(files, content):
    files.mount_v2("/")
    files.set("v2", "/", cpu__max=content)
    assert cpu_quota(files.proc) == math.inf


@pytest.mark.parametrize(("uid", "expected"), [(0, Limit(math.inf, 0)), (7, Limit(250, 12))])
def test_a_users_own_limit_counts_threads_and_not_for_root(monkeypatch, uid, expected):
    def process(real: int, num_threads: int | None) -> SimpleNamespace:
        uids = SimpleNamespace(real=real)
        return SimpleNamespace(info={"uids": uids, "num_threads": num_threads})

    monkeypatch.setattr("app.stages.threads.os.geteuid", lambda: uid)
    monkeypatch.setattr("app.stages.threads.os.getuid", lambda: uid)
    monkeypatch.setattr("app.stages.threads.resource.getrlimit", lambda _: (250, 250))
    processes = [process(7, 10), process(0, 99), process(7, None), process(7, 1)]
    monkeypatch.setattr("psutil.process_iter", lambda _: processes)
    assert user_limit() == expected


def test_the_limit_of_processes_with_the_least_left(files):
    files.mount_v2("/pod/tandem")
    files.set("v2", "/pod", pids__max=250, pids__current=240)
    files.set("v2", "/pod/tandem", pids__max=100, pids__current=20)
    limit = tightest_pids_limit(files.proc)
    assert (limit, limit.left) == (Limit(250, 240), 10)


def fail(health: Health, error: BaseException, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)), health.run():
            raise error


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def health(clock) -> Health:
    return Health("batch of resnet50", lambda: clock[0])


def test_failures_in_a_row_count_but_no_caller_that_goes_away(health):
    health.check()
    fail(health, asyncio.CancelledError(), 10)
    health.check()
    fail(health, RuntimeError("no memory"), MAX_FAILURES - 1)
    health.check()
    with health.run():
        pass  # one success and all is forgiven
    fail(health, RuntimeError("no memory"), MAX_FAILURES)
    with pytest.raises(UnhealthyError, match="3 times in a row a batch of resnet50 failed"):
        health.check()


def test_a_batch_that_does_not_end(health, clock):
    with health.run():
        clock[0] += MAX_RUN_S
        with health.run():
            pass
        health.check()
        clock[0] += 1.0
        with pytest.raises(UnhealthyError, match="has run for 31 s, the limit is 30"):
            health.check()
    health.check()


def test_what_a_clients_file_may_cause_is_not_counted(clock):
    health = Health("file that is decoded", lambda: clock[0], counts_failures=False)
    fail(health, RuntimeError("damaged"), 10 * MAX_FAILURES)
    health.check()
    with health.run():
        clock[0] += MAX_RUN_S + 1
        with pytest.raises(UnhealthyError, match="a file that is decoded has run for 31 s"):
            health.check()


@cases(
    "cores, streams, num, threads_each",
    (2, 0, 2, 1),  # one batch on every core
    (2, 1, 1, 2),  # one batch on all
    (8, 2, 2, 4),
    (8, 3, 3, 2),  # two cores are left over
    (2, 9, 2, 1),  # no more than there are
    (1, 0, 1, 1),
)
def test_cores_are_shared_out(cores: int, streams: int, num: int, threads_each: int) -> None:
    threads = inference_threads_for(cores, streams)
    assert (threads.num, threads.threads_each) == (num, threads_each)


@pytest.mark.parametrize(("cpus", "sharing", "cores"), [(8, 1, 8), (8, 2, 4), (1, 2, 1), (3, 2, 1)])
def test_without_whole_cpus_the_machine_is_divided(monkeypatch, cpus, sharing, cores) -> None:
    monkeypatch.setattr("app.stages.threads.available_cpus", lambda: cpus)
    assert replica_inference_threads(STREAMS, sharing).num == cores


@pytest.mark.parametrize(("assigned", "cores"), [(3, 3), (8, 4), (0, 4)])
def test_whole_cpus_count_as_far_as_they_are_there(monkeypatch, caplog, assigned, cores) -> None:
    monkeypatch.setattr("app.stages.threads.available_cpus", lambda: 4)
    monkeypatch.setattr("app.stages.threads._whole_cpus", lambda: assigned)
    assert replica_inference_threads(STREAMS, 1).num == cores
    assert ("it uses those" in caplog.text) is (assigned > 4)


def test_too_many_streams_are_told(monkeypatch, caplog) -> None:
    monkeypatch.setattr("app.stages.threads.available_cpus", lambda: 2)
    assert replica_inference_threads(5).num == 2
    assert "num_cpus 0, streams 5, but this replica has 2 cores" in caplog.text


async def test_as_many_run_at_a_time_as_there_are() -> None:
    threads, meeting = InferenceThreads(2), threading.Barrier(2, timeout=10)
    assert await asyncio.gather(*(threads.run(lambda n: meeting.wait() * 0 + n, i) for i in (1, 2)))


def test_with_threads_apart_no_batch_is_formed_ahead() -> None:
    """It would begin at once on the other threads: more batches than cores."""
    threads = InferenceThreads(2)
    assert threads.scheduler.num_ahead == 2
    assert threads.apart().scheduler is threads.scheduler
    assert threads.scheduler.num_ahead == 0


def test_what_is_taken_ahead_begins_when_a_thread_is_free_in_order() -> None:
    threads, began, may_end = InferenceThreads(1), [], threading.Event()

    def work(number: int) -> int:
        began.append(number)
        may_end.wait(10)
        return number

    async def run() -> list[int]:
        runs = [asyncio.ensure_future(threads.run(work, number)) for number in range(3)]
        while not began:
            await asyncio.sleep(0.001)
        assert began == [0]
        may_end.set()
        return await asyncio.gather(*runs)

    assert (asyncio.run(run()), began) == ([0, 1, 2], [0, 1, 2])


async def ended(thread: threading.Thread) -> None:
    async with asyncio.timeout(30):
        while thread.is_alive():
            await asyncio.sleep(0.001)


async def test_a_result_or_an_error_is_the_callers_and_the_thread_ends():
    thread = await on_own_thread("load", threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.name.startswith("load")
    await ended(thread)
    threads = []

    def work() -> None:
        threads.append(threading.current_thread())
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await on_own_thread("load", work)
    await ended(threads[0])


async def test_work_goes_on_without_its_caller() -> None:
    may_end, has_begun, has_ended = (threading.Event() for _ in range(3))

    def work() -> None:
        has_begun.set()
        may_end.wait()
        has_ended.set()

    caller = asyncio.create_task(on_own_thread("load", work))
    await asyncio.to_thread(has_begun.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    assert await asyncio.to_thread(has_ended.wait, 30)


# Memory that a process may take: the machine's, cut to the tightest limit of its groups.


@pytest.fixture
def limited(tmp_path):
    """Limit the group around the process's own."""

    def limit(most: object, used: int, files: int, **more: object):
        made = CgroupFiles(tmp_path)
        made.mount_v2("/pod/tandem")
        stat = f"anon 1\ninactive_file {files}\nactive_file 7"
        made.set("v2", "/pod", memory__max=most, memory__current=used, memory__stat=stat, **more)
        return made.proc

    return limit


@pytest.mark.parametrize(
    ("limit", "used", "files", "free"),
    [(100 * MIB, 60 * MIB, 0, 40 * MIB), (100 * MIB, 60 * MIB, 10 * MIB, 50 * MIB), (9, 10, 0, 0)],
)
def test_a_limit_counts(limited, limit, used, files, free):
    assert free_memory(limited(limit, used, files)) == free


@cases(
    "group, left",
    ({"memory__swap__max": 30 * MIB, "memory__swap__current": 10 * MIB}, 60 * MIB),
    ({"memory__swap__max": "max", "memory__swap__current": 0}, 540 * MIB),
    ({}, 540 * MIB),
    ({"memory__swap__max": 0}, 40 * MIB),
)
def test_at_most_counts_swap_and_cached_files_in_use(limited, monkeypatch, group, left):
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=500 * MIB))
    proc = limited(100 * MIB, 60 * MIB, 0, **group)
    assert memory_left(proc, at_most=True) == left + 7  # active_file
    assert memory_left(proc) == 40 * MIB
    assert free_memory(proc, with_files=True) == 40 * MIB + 7  # without swap


def test_swap_of_version_1_is_what_its_second_limit_adds(files, monkeypatch):
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=500 * MIB))
    files.mount_v1("memory", "/a")
    limits = {"memory__limit_in_bytes": 100 * MIB, "memory__memsw__limit_in_bytes": 130 * MIB}
    files.set("memory", "/a", memory__usage_in_bytes=MIB, **limits)
    assert memory_left(files.proc, at_most=True) == 129 * MIB


@pytest.mark.parametrize("limit", [None, 2**60, "max"])
def test_without_a_limit_below_it_the_machines_memory_counts(limited, tmp_path, limit):
    proc = limited(limit, 1, 1) if limit else tmp_path / "none"
    assert free_memory(proc) < psutil.virtual_memory().total
    assert abs(free_memory(proc) - psutil.virtual_memory().available) < 512 * MIB
