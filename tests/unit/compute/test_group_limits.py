"""The tightest limit of all control groups that the process is in."""

import math
from types import SimpleNamespace

import pytest

from app.compute.group_limits import Limit, memory_left, tightest_pids_limit, user_limit
from models.cpus import cpu_quota
from tests.support.cgroup_files import CgroupFiles

MIB = 2**20
UNLIMITED_V1 = 2**63 - 4096  # version 1's word for no limit of memory


@pytest.fixture
def files(tmp_path):
    return CgroupFiles(tmp_path)


def test_without_groups_there_is_no_limit(tmp_path, files):
    for proc in (files.proc, tmp_path / "none"):
        assert cpu_quota(proc) == math.inf
        assert memory_left(proc) == math.inf
        assert tightest_pids_limit(proc) == Limit(math.inf, 0)


def test_a_container_sees_its_own_group_as_the_root(files):
    files.mount_v2("/")
    files.set("v2", "/", cpu__max="150000 100000", memory__max=100 * MIB, memory__current=60 * MIB)
    assert cpu_quota(files.proc) == 1.5
    assert memory_left(files.proc) == 40 * MIB


@pytest.mark.parametrize("tight", ["/", "/system.slice", "/system.slice/tandem.service"])
def test_the_tightest_of_nested_groups_counts(files, tight):
    files.mount_v2("/system.slice/tandem.service")
    for group in ("/system.slice", "/system.slice/tandem.service"):
        files.set("v2", group, cpu__max="max 100000", memory__max="max", memory__current=1)
    files.set("v2", tight, cpu__max="100000 100000", memory__max=10 * MIB, memory__current=MIB)
    files.set("v2", "/other.slice", cpu__max="1000 100000", memory__max=1, memory__current=1)
    assert cpu_quota(files.proc) == 1
    assert memory_left(files.proc) == 9 * MIB


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
    assert cpu_quota(files.proc) == 2.5
    assert memory_left(files.proc) == 50 * MIB


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

    monkeypatch.setattr("app.compute.group_limits.os.geteuid", lambda: uid)
    monkeypatch.setattr("app.compute.group_limits.os.getuid", lambda: uid)
    monkeypatch.setattr("app.compute.group_limits.resource.getrlimit", lambda _: (250, 250))
    processes = [process(7, 10), process(0, 99), process(7, None), process(7, 1)]
    monkeypatch.setattr("psutil.process_iter", lambda _: processes)
    assert user_limit() == expected


def test_the_limit_of_processes_with_the_least_left(files):
    files.mount_v2("/pod/tandem")
    files.set("v2", "/pod", pids__max=250, pids__current=240)
    files.set("v2", "/pod/tandem", pids__max=100, pids__current=20)
    limit = tightest_pids_limit(files.proc)
    assert (limit, limit.left) == (Limit(250, 240), 10)
