"""Registering regions of shared memory, and using them: every way in which they do not fit."""

import os
from pathlib import Path

import pytest

from app.errors import BadRegionError, RegionExistsError, UnknownRegionError
from app.oip.documents import RegionStatus
from app.oip.regions import MAX_NAME, MAX_REGIONS
from app.oip.tensors import RegionSlice
from tests.support.shared_regions import Memory

DATA = bytes(range(100))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def read(memory: Memory, part: RegionSlice) -> bytes:
    return memory.regions.read(part)


def test_a_part_of_a_part_is_read_and_written(memory):
    place = memory.file("k", DATA)
    memory.regions.register("r", "/k", 10, 50)
    assert read(memory, RegionSlice("r", 5, 20)) == DATA[30:35]
    assert read(memory, RegionSlice("r", 50)) == DATA[10:60]
    filled = memory.regions.write(RegionSlice("r", 9, 40), b"abc")
    assert filled == RegionSlice("r", 3, 40)
    assert place.read_bytes() == DATA[:50] + b"abc" + DATA[53:]


def test_regions_are_described_and_forgotten(memory):
    names = ["b", "a/../../x", ".", "ü\0\n", "n" * MAX_NAME]
    memory.file("k", DATA)
    for number, name in enumerate(names):
        memory.regions.register(name, "/k", number, 10)
    found = {one.name: one for one in memory.regions.status()}
    assert list(found) == sorted(names)
    assert found["ü\0\n"] == RegionStatus("ü\0\n", "/k", 3, 10)
    assert memory.regions.status("b") == [RegionStatus("b", "/k", 0, 10)]
    memory.regions.unregister("b")
    memory.regions.unregister("b")
    memory.regions.unregister("never there")
    with pytest.raises(UnknownRegionError, match="'b' is not registered"):
        memory.regions.status("b")
    assert len(memory.regions.status()) == 4
    memory.regions.unregister()
    assert memory.regions.status() == []
    assert list(memory.entries.iterdir()) == []
    assert (memory.folder / "k").read_bytes() == DATA


def test_every_gateway_of_the_run_knows_a_region(memory):
    memory.region(DATA)
    other = memory.of_another_gateway()
    assert other.read(RegionSlice("r", 100)) == DATA
    with pytest.raises(RegionExistsError):
        other.register("r", "k", 0, 1)
    other.unregister("r")
    with pytest.raises(UnknownRegionError):
        read(memory, RegionSlice("r", 100))


def test_a_name_is_registered_once(memory):
    memory.region(DATA)
    with pytest.raises(RegionExistsError, match="'r' is registered already; unregister it first"):
        memory.regions.register("r", "k", 0, 50)
    assert memory.regions.status("r")[0].byte_size == 100
    assert len(list(memory.entries.iterdir())) == 1


def test_there_are_not_more_regions_than_the_limit(memory):
    memory.file("k", DATA)
    for number in range(MAX_REGIONS):
        memory.regions.register(str(number), "k", 0, 1)
    with pytest.raises(BadRegionError, match=f"{MAX_REGIONS} regions are registered, the limit"):
        memory.regions.register("one more", "k", 0, 1)
    memory.regions.unregister("7")
    memory.regions.register("one more", "k", 0, 1)


@pytest.mark.parametrize(
    ("offset", "byte_size", "says"),
    [
        (0, 101, "has 100 bytes, and it needs 101"),
        (1, 100, "has 100 bytes, and it needs 101"),
        (100, 1, "it needs 101"),
        (-1, 10, "offset is -1"),
        (0, -1, "byte_size is -1"),
        (0, 0, "byte_size is 0"),
        (0, None, "byte_size is None"),
        (None, 1, "offset is None"),
        ("0", 1, "offset is '0'"),
        (0.0, 1, "offset is 0.0"),
        (False, True, "offset is False"),
        (2**63 - 1, 2**63 - 1, "it needs 18446744073709551614"),
        (2**63, 1, "offset is 9223372036854775808"),
        (0, 2**70, "byte_size is 11"),
    ],
)
def test_parts_that_no_file_has(memory, offset, byte_size, says):
    memory.file("k", DATA)
    with pytest.raises(BadRegionError, match=says):
        memory.regions.register("r", "k", offset, byte_size)
    assert memory.regions.status() == []


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME + 1), None, 3, "\ud800"])
def test_names_that_no_region_has(memory, name):
    memory.file("k", DATA)
    with pytest.raises(BadRegionError, match="a region's name is"):
        memory.regions.register(name, "k", 0, 1)


@pytest.mark.parametrize("key", ["../k", "a/k", "..", "k\0", None, "nothing"])
def test_keys_that_are_no_file(memory, key):
    memory.file("k", DATA)
    with pytest.raises(BadRegionError, match=r"key is|cannot be opened"):
        memory.regions.register("r", key, 0, 1)


@pytest.mark.parametrize(
    ("size", "offset"),
    [(101, 0), (100, 1), (1, 100), (1, 2**63 - 1), (2**70, 2**70), (5, -5), (0, 1), (-1, 1)],
)
def test_parts_beyond_a_region(memory, size, offset):
    memory.file("k", DATA + b"another's")
    memory.regions.register("r", "k", 0, 100)
    part = RegionSlice("r", size, offset)
    for use in (lambda: read(memory, part), lambda: memory.regions.check(part)):
        with pytest.raises(BadRegionError, match="'r' has 100 bytes, and"):
            use()


def test_an_output_that_does_not_fit_its_part_is_not_written(memory):
    place = memory.region(DATA)
    with pytest.raises(BadRegionError, match="has 11 bytes, and 10 are given to it"):
        memory.regions.write(RegionSlice("r", 10), b"12345678901")
    assert place.read_bytes() == DATA


def uses(memory: Memory):
    """Return every way of using the region, the last 10 bytes of it."""
    part = RegionSlice("r", 10, 90)
    return (
        lambda: read(memory, part),
        lambda: memory.regions.check(part),
        lambda: memory.regions.write(part, b"x"),
    )


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (lambda place: place.unlink(), "No such file"),
        (lambda place: os.truncate(place, 99), "has 99 bytes, and it needs 100"),
        (lambda place: os.truncate(place, 0), "has 0 bytes, and it needs 100"),
        (lambda place: replaced(place), "its file was replaced; register it again"),
        (lambda place: linked(place), "symbolic links"),
    ],
)
def test_what_happens_to_a_file_meanwhile_is_noticed_at_every_use(memory, happens, says):
    happens(memory.region(DATA))
    for use in uses(memory):
        with pytest.raises(BadRegionError, match=says):
            use()


def replaced(place: Path) -> None:
    other = place.with_name("other")
    other.write_bytes(DATA)
    other.rename(place)


def linked(place: Path) -> None:
    place.rename(place.with_name("other"))
    place.symlink_to(place.with_name("other"))


def test_a_file_that_grows_stays_in_use(memory):
    place = memory.region(DATA)
    os.truncate(place, 10_000)
    assert read(memory, RegionSlice("r", 100)) == DATA


def test_a_region_that_was_never_registered(memory):
    for use in uses(memory):
        with pytest.raises(UnknownRegionError, match="'r' is not registered; register it first"):
            use()
