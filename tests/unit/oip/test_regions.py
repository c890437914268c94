"""Regions of shared memory: registering and using them, their files, and who may use them."""

import errno
import gc
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.changes import is_loopback
from app.environment import REGIONS_FOLDER
from app.errors import BadRegionError, ConfigError, RegionExistsError, UnknownRegionError
from app.oip.models import RegionStatus
from app.oip.regions import (
    MAX_NAME,
    MAX_REGIONS,
    OpenFile,
    file_name,
    for_caller,
    opened,
    read_at,
    regions_of,
    write_at,
)
from app.oip.tensors import RegionSlice
from app.settings import Settings
from tests.support.cases import cases
from tests.support.shared_regions import Memory

DATA = bytes(range(100))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def test_a_part_of_a_part_is_read_and_written_and_the_file_may_grow(memory):
    place = memory.file("k", DATA)
    memory.regions.register("r", "/k", 10, 50)
    assert memory.regions.read(RegionSlice("r", 5, 20)) == DATA[30:35]
    assert memory.regions.read(RegionSlice("r", 50)) == DATA[10:60]
    assert memory.regions.write(RegionSlice("r", 9, 40), b"abc") == RegionSlice("r", 3, 40)
    assert place.read_bytes() == DATA[:50] + b"abc" + DATA[53:]
    os.truncate(place, 10_000)
    assert memory.regions.read(RegionSlice("r", 5, 20)) == DATA[30:35]


def test_regions_are_described_and_forgotten(memory):
    names = ["b", "a/../../x", ".", "ü\0\n", "n" * MAX_NAME]
    memory.file("k", DATA)
    for number, name in enumerate(names):
        memory.regions.register(name, "/k", number, 10)
    expected = [RegionStatus(name, "/k", names.index(name), 10) for name in sorted(names)]
    assert memory.regions.status() == expected
    assert memory.regions.status("b") == [RegionStatus("b", "/k", 0, 10)]
    for name in ("b", "b", "never there"):
        memory.regions.unregister(name)
    with pytest.raises(UnknownRegionError, match="'b' is not registered"):
        memory.regions.status("b")
    assert len(memory.regions.status()) == 4
    memory.regions.unregister()
    assert (memory.regions.status(), list(memory.entries.iterdir())) == ([], [])
    assert (memory.folder / "k").read_bytes() == DATA


def test_every_gateway_of_the_run_knows_a_region(memory):
    memory.region(DATA)
    other = memory.of_another_gateway()
    assert other.read(RegionSlice("r", 100)) == DATA
    with pytest.raises(RegionExistsError):
        other.register("r", "k", 0, 1)
    other.unregister("r")
    with pytest.raises(UnknownRegionError):
        memory.regions.read(RegionSlice("r", 100))


def test_there_are_not_more_regions_than_the_limit(memory):
    memory.file("k", DATA)
    for number in range(MAX_REGIONS):
        memory.regions.register(str(number), "k", 0, 1)
    with pytest.raises(BadRegionError, match=f"{MAX_REGIONS} regions are registered, the limit"):
        memory.regions.register("one more", "k", 0, 1)
    memory.regions.unregister("7")
    memory.regions.register("one more", "k", 0, 1)


def test_an_entry_that_cannot_be_written_is_not_half_there(memory, monkeypatch):
    memory.file("k", DATA)

    def full(place: Path, data: bytes) -> None:
        place.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(BadRegionError, match=r"cannot be kept in .*: No space left"):
            memory.regions.register("r", "k", 0, 1)
    assert list(memory.entries.iterdir()) == []
    memory.regions.register("r", "k", 0, 1)


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME + 1), None, 3, "\ud800"])
def test_names_that_no_region_has(memory, name):
    memory.file("k", DATA)
    with pytest.raises(BadRegionError, match="a region's name is"):
        memory.regions.register(name, "k", 0, 1)


@pytest.mark.parametrize(
    ("size", "offset"),
    [(101, 0), (100, 1), (1, 100), (1, 2**63 - 1), (2**70, 2**70), (5, -5), (0, 1), (-1, 1)],
)
def test_parts_beyond_a_region(memory, size, offset):
    memory.file("k", DATA + b"another's")
    memory.regions.register("r", "k", 0, 100)
    part = RegionSlice("r", size, offset)
    for use in (memory.regions.read, memory.regions.check):
        with pytest.raises(BadRegionError, match="'r' has 100 bytes, and"):
            use(part)


def uses(memory: Memory):
    """Return every way of using the region, the last 10 bytes of it."""
    part, regions = RegionSlice("r", 10, 90), memory.regions
    return [partial(use, part) for use in (regions.read, regions.check)] + [
        partial(regions.write, part, b"x")
    ]


@cases(
    "happens, error, says",
    (lambda place: place.unlink(), BadRegionError, "No such file"),
    (lambda place: os.truncate(place, 99), BadRegionError, "has 99 bytes, and it needs 100"),
    (lambda place: os.truncate(place, 0), BadRegionError, "has 0 bytes, and it needs 100"),
    (lambda place: replaced(place), BadRegionError, "its file was replaced; register it again"),
    (lambda place: linked(place), BadRegionError, "symbolic links"),
    (None, UnknownRegionError, "'r' is not registered; register it first"),
)
def test_what_happens_to_a_file_meanwhile_is_noticed_at_every_use(memory, happens, error, says):
    """Nothing happens to the file of a region that was never registered."""
    if happens:
        happens(memory.region(DATA))
    for use in uses(memory):
        with pytest.raises(error, match=says):
            use()


def replaced(place: Path) -> None:
    other = place.with_name("other")
    other.write_bytes(DATA)
    other.rename(place)


def linked(place: Path) -> None:
    place.rename(place.with_name("other"))
    place.symlink_to(place.with_name("other"))


def test_names_of_files_with_or_without_the_slash_of_shm_open() -> None:
    for key in ("k", "/k", "a b", ".k", "..k", "ü", "k" * 255):
        assert file_name(key) == key.removeprefix("/")


@cases(
    "key",
    *("", "/", ".", "..", "...", "/..", "a/b", "//k", "/k/", "../k", "/dev/shm/k", "a\0b"),
    *("k" * 256, "ü" * 128, "\ud800", None, 3, ["k"], b"k", True),
)
def test_what_names_no_file_of_the_folder(key: object) -> None:
    with pytest.raises(BadRegionError, match="key is ") as refused:
        file_name(key)
    assert len(refused.value.message) < 300


def test_files_are_closed_whatever_happens(memory) -> None:
    memory.file("k", b"1")
    with pytest.raises(KeyError), opened(memory.folder, "k") as file:
        raise KeyError
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(memory) -> None:
    """As a mapping, it would be the end of the process (SIGBUS)."""
    place = memory.file("k", bytes(100_000))
    with opened(memory.folder, "k") as file:
        for left, asked in ((5000, 100_000), (0, 1)):
            os.truncate(place, left)
            with pytest.raises(BadRegionError, match=f"ended after {left} of {asked} bytes"):
                read_at(file, 0, asked)


def test_a_file_that_is_gone_is_still_read_and_full_memory_an_error(memory):
    place = memory.file("k", b"mine")
    with opened(memory.folder, "k") as file:
        place.unlink()
        place.write_bytes(b"else")
        assert read_at(file, 0, 4) == b"mine"
    says = "took 0 of 3 bytes: No space left"
    with (
        Path("/dev/full").open("r+b", buffering=0) as full,
        pytest.raises(BadRegionError, match=says),
    ):
        write_at(OpenFile(full.fileno(), (0, 0), 3), 0, b"abc")


def descriptors() -> set[str]:
    """Return what this process has open, but for what earlier tests left to the collector."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the numbers, not paths


@pytest.mark.parametrize("is_writing", [False, True])
@cases(
    "make, says",
    (lambda place: None, "No such file"),
    (lambda place: place.mkdir(), "no regular file|Is a directory"),
    (lambda place: place.symlink_to(place.with_name("other")), "symbolic links"),
    (lambda place: os.mkfifo(place), "no regular file"),
)
def test_what_is_no_regular_file_is_not_opened_and_not_waited_for(tmp_path, make, says, is_writing):
    (tmp_path / "other").write_bytes(b"secret")
    make(tmp_path / "k")
    before = descriptors()
    with pytest.raises(BadRegionError, match=says), opened(tmp_path, "k", is_writing=is_writing):
        pass
    assert descriptors() <= before


@pytest.mark.parametrize(("mode", "is_writing"), [(0o600, False), (0o644, True)])
def test_root_opens_no_file_that_another_user_keeps_private(
    shared_place, neighbour, mode, is_writing
):
    neighbour(f"echo theirs > k; chmod {mode:o} k")
    with (
        pytest.raises(BadRegionError, match=f"private to another user .mode {mode:o}.; chmod 666"),
        opened(shared_place, "k", is_writing=is_writing),
    ):
        pass
    neighbour("chmod 666 k")
    with opened(shared_place, "k", is_writing=is_writing) as file:
        assert file.size == 7


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=SLOW)
TOLD = (BadRegionError, UnknownRegionError, RegionExistsError)
NUMBERS = st.integers(0, 70) | st.sampled_from([-1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63)])
ANY = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
NAMES = st.sampled_from(["r", "s"])
KEYS = st.sampled_from(["k", "/k", "l", "link", "pipe", "folder", "..", "../entries", "/", "k\0"])
STEPS = st.one_of(
    st.tuples(st.just("register"), NAMES | ANY, KEYS | ANY, NUMBERS | ANY, NUMBERS | ANY),
    st.tuples(st.just("read"), NAMES | st.text(max_size=3), NUMBERS, NUMBERS),
    st.tuples(st.just("write"), NAMES, NUMBERS, NUMBERS),
    st.tuples(st.just("truncate"), st.sampled_from(["k", "l"]), st.integers(0, 100)),
    st.tuples(st.just("unlink"), st.sampled_from(["k", "l"])),
    st.tuples(st.just("unregister"), NAMES | st.just("")),
)


class Run:
    """Takes steps, and knows what must be there."""

    def __init__(self, folder: Path) -> None:
        self._memory = Memory(folder)
        self._secret = self._memory.entries.parent / "secret"
        self._secret.write_bytes(b"nobody's")
        for key in ("k", "l"):
            self._memory.file(key, bytes(range(64)))
        (self._memory.folder / "link").symlink_to(self._secret)
        (self._memory.folder / "folder").mkdir()
        os.mkfifo(self._memory.folder / "pipe")

    def take(self, step):
        verb, *rest = step
        refused = None
        try:
            getattr(self, f"_{verb}")(*rest)
        except TOLD as error:
            refused = error
        assert refused is None or 0 < len(refused.message) < 600
        assert self._secret.read_bytes() == b"nobody's"

    def _register(self, *given):
        self._memory.regions.register(*given)
        assert given[0] in [one.name for one in self._memory.regions.status()]

    def _read(self, name: str, byte_size: int, offset: int) -> None:
        assert len(self._memory.regions.read(RegionSlice(name, byte_size, offset))) == byte_size

    def _write(self, name: str, byte_size: int, offset: int) -> None:
        part = RegionSlice(name, byte_size, offset)
        self._memory.regions.write(part, bytes(max(0, min(byte_size, 8))))

    def _truncate(self, key: str, size: int) -> None:
        if (place := self._memory.folder / key).exists():
            os.truncate(place, size)

    def _unlink(self, key: str) -> None:
        (self._memory.folder / key).unlink(missing_ok=True)

    def _unregister(self, name: str) -> None:
        self._memory.regions.unregister(name)


@EXAMPLES
@given(st.lists(STEPS, max_size=12))
def test_any_steps_in_any_order(steps):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        for step in steps:
            run.take(step)


def test_only_an_unproxied_service_on_loopback_has_it_and_only_if_asked(monkeypatch, tmp_path):
    monkeypatch.delenv(REGIONS_FOLDER, raising=False)
    with pytest.raises(ConfigError, match="is for tandem serve"):
        regions_of(is_on=True)
    monkeypatch.setenv(REGIONS_FOLDER, str(tmp_path))
    assert regions_of(is_on=False) is None
    assert for_caller(regions_of(is_on=True), is_local=True).status() == []
    with pytest.raises(ValidationError, match="set shared_memory: unproxied"):
        Settings(shared_memory=True)
    assert not Settings().shared_memory
    ours = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
    others = ["10.0.0.7", "::ffff:10.0.0.7", "0.0.0.0", "fe80::1", "localhost", ""]
    others += ["127.0.0.1.evil.example"]
    assert [address for address in ours + others if is_loopback(address)] == ours
