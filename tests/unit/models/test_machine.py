"""CPUs by affinity and quota; memory given back after compiling, and kept for decoding."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models import machine
from models.machine import available_cpus, cpu_model, give_back_memory, usable_cpus
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.cases import cases
from tests.support.cgroup_files import CgroupFiles
from tests.support.tiny_networks import save_model, tiny_model

of_linux = pytest.mark.skipif(not machine.MAPS.exists(), reason="Linux's /proc")
SIZE = 1 << 20


def resident_kib(path: Path) -> int:
    """Return how much of a mapped file the process holds."""
    text, total = Path("/proc/self/smaps").read_text("utf-8"), 0
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        head, _, rest = part.partition("\n")
        if head.endswith(str(path)):
            total += sum(map(int, re.findall(r"Rss: +(\d+) kB", rest)))
    return total


@pytest.fixture
def mapped(tmp_path):
    """Return a function that maps a new file of random bytes and reads all of it."""
    opened = []

    def map_file(name: str, prot: int = mmap.PROT_READ) -> tuple[Path, mmap.mmap, bytes]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = np.random.default_rng(3).bytes(SIZE)
        path.write_bytes(content)
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED, prot)
        opened.append(view)
        assert (view[:], resident_kib(path)) == (content, SIZE // 1024)
        return path, view, content

    yield map_file
    for view in opened:
        view.close()


@of_linux
def test_pages_of_a_mapped_file_are_dropped_and_read_again(mapped, monkeypatch, tmp_path):
    path, view, content = mapped("a/network.bin")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "MAPS", tmp_path / "none")  # without /proc nothing is dropped
        give_back_memory(path.parent)
    assert resident_kib(path) == SIZE // 1024
    give_back_memory(path.parent)
    assert (resident_kib(path), view[:]) == (0, content)


@of_linux
def test_files_elsewhere_and_writable_ones_stay(mapped):
    elsewhere, _, _ = mapped("a/network.bin")
    writable, _, _ = mapped("b/network.bin", mmap.PROT_READ | mmap.PROT_WRITE)
    give_back_memory(writable.parent)
    assert resident_kib(elsewhere) == resident_kib(writable) == SIZE // 1024


@of_linux
def test_a_compiled_network_holds_no_pages_and_answers_as_before(tmp_path):
    save_model(tiny_model(), tmp_path, "net")
    options = RuntimeOptions(batch_sizes=(1, 2), cache_dir=tmp_path / "cache")
    first = CompiledNetwork(tmp_path / "net.xml", options)
    images = np.random.default_rng(5).integers(0, 256, (2, *first.input_shape), np.uint8)
    expected = first.predict(images)
    cached = CompiledNetwork(tmp_path / "net.xml", options)
    blobs = list((tmp_path / "cache").iterdir())
    assert blobs
    assert sum(map(resident_kib, blobs)) == 0
    np.testing.assert_array_equal(cached.predict(images), expected)


FAULTS = """
import sys, threading
from resource import RUSAGE_THREAD, getrusage
import numpy as np
from models import machine

def photo():
    return [np.ones(size, np.uint8) for size in (560_000, 560_000, 560_000, 300_000)]

def faults_of_100():
    for _ in range(20):
        photo()
    before = getrusage(RUSAGE_THREAD).ru_minflt
    for _ in range(100):
        photo()
    print((getrusage(RUSAGE_THREAD).ru_minflt - before) / 100)

if "keep" in sys.argv:
    machine.keep_freed_memory()
thread = threading.Thread(target=faults_of_100)  # as a decoding thread: an arena of its own
thread.start()
thread.join()
"""


@of_linux
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's")
def test_a_photo_finds_the_memory_that_the_last_one_has_freed():
    def faults(*arguments: str) -> float:
        command = [sys.executable, "-c", FAULTS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return float(done.stdout)

    assert faults("keep") < 2
    assert faults() > 20  # or there is nothing to do any more


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@cases(
    "content, expected",
    ("max 100000", 8),
    ("200000 100000", 2),
    ("250000 100000", 2),
    ("50000 100000", 1),  # half a CPU is one thread
    ("6400000 100000", 8),  # a quota above the cores there are
    ("", 8),
)
def test_the_quota_of_a_cgroup(tmp_path, content, expected):
    files = CgroupFiles(tmp_path)
    files.mount_v2("/system.slice/tandem.service")
    files.set("v2", "/system.slice", cpu__max=content)
    assert available_cpus(files.proc) == expected


@pytest.mark.usefixtures("eight_cores")
def test_a_system_without_cgroups_or_affinity_masks(tmp_path, monkeypatch):
    assert available_cpus(tmp_path) == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert (usable_cpus(), available_cpus(tmp_path)) == ({0, 1, 2}, 3)
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
