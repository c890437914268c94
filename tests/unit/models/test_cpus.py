"""How many CPUs there are: the affinity mask, cut to the container's quota."""

import os

import pytest

from models.machine import available_cpus, cpu_model, usable_cpus
from tests.support.cgroup_files import CgroupFiles


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),  # half a CPU is one thread
        ("6400000 100000", 8),  # a quota above the cores there are
        ("", 8),
    ],
)
def test_the_quota_of_a_cgroup(tmp_path, content, expected):
    files = CgroupFiles(tmp_path)
    files.mount_v2("/system.slice/tandem.service")
    files.set("v2", "/system.slice", cpu__max=content)
    assert available_cpus(files.proc) == expected


def test_no_cgroup(tmp_path):
    assert available_cpus(tmp_path) == 8


def test_a_system_without_affinity_masks(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cpus() == {0, 1, 2}
    assert available_cpus(tmp_path) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cpus(tmp_path) == 1


def test_the_cpus_name_and_what_decides_int8(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512_vnni amx_int8\n\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: fpu\n"
    )
    assert cpu_model(info) == "Xeon (avx2 avx512_vnni amx_int8)"
    info.write_text("Hardware: something\n")
    assert cpu_model(info) == "unknown (no int8 extensions)"
    assert cpu_model(tmp_path / "missing") == "unknown"
