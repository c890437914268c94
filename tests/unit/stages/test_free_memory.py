"""Memory that a process may take: the machine's, cut to the tightest limit of its groups."""

import psutil
import pytest

from app.stages.threads import free_memory
from tests.support.cgroup_files import CgroupFiles

MIB = 2**20


@pytest.fixture
def limited(tmp_path):
    """Limit the group around the process's own."""

    def limit(most: object, used: int, files: int):
        made = CgroupFiles(tmp_path)
        made.mount_v2("/pod/tandem")
        stat = f"anon 1\ninactive_file {files}\nactive_file 7"
        made.set("v2", "/pod", memory__max=most, memory__current=used, memory__stat=stat)
        return made.proc

    return limit


@pytest.mark.parametrize(
    ("limit", "used", "files", "free"),
    [(100 * MIB, 60 * MIB, 0, 40 * MIB), (100 * MIB, 60 * MIB, 10 * MIB, 50 * MIB), (9, 10, 0, 0)],
)
def test_a_limit_counts(limited, limit, used, files, free):
    assert free_memory(limited(limit, used, files)) == free


def test_a_limit_above_the_machines_memory_does_not(limited):
    assert free_memory(limited(2**60, 0, 0)) < psutil.virtual_memory().total


def test_without_a_limit_the_machine_counts(tmp_path, limited):
    machine = psutil.virtual_memory().available
    for proc in (tmp_path / "none", limited("max", 1, 1)):
        assert abs(free_memory(proc) - machine) < 512 * MIB
