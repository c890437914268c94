"""Memory that a process may take: the machine's, cut to the container's limit."""

from pathlib import Path

import psutil
import pytest

from app.compute.free_memory import free_memory

MIB = 2**20


def cgroup(folder: Path, limit: str, used: int, files: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file 7\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "used", "files", "free"),
    [(100 * MIB, 60 * MIB, 0, 40 * MIB), (100 * MIB, 60 * MIB, 10 * MIB, 50 * MIB), (9, 10, 0, 0)],
)
def test_a_containers_limit_counts(tmp_path, limit, used, files, free):
    assert free_memory(cgroup(tmp_path, str(limit), used, files)) == free


def test_a_limit_above_the_machines_memory_does_not(tmp_path):
    assert free_memory(cgroup(tmp_path, str(2**60), 0, 0)) < psutil.virtual_memory().total


def test_without_a_limit_the_machine_counts(tmp_path):
    machine = psutil.virtual_memory().available
    for folder in (tmp_path / "none", cgroup(tmp_path, "max", 1, 1)):
        assert abs(free_memory(folder) - machine) < 512 * MIB
