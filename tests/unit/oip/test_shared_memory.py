"""Who may use shared memory, and where it is on."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.environment import REGIONS_FOLDER
from app.errors import BadRegionError, ConfigError, NotLocalError, OverloadedError
from app.oip.shared_memory import (
    LONG_BYTES,
    for_caller,
    is_loopback,
    loaded,
    regions_of,
)
from app.oip.tensors import RegionSlice, Tensor
from app.queueing.admission import ByteBudget, Share
from app.settings import Settings
from tests.support.shared_regions import Memory


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(REGIONS_FOLDER, str(tmp_path))
    assert regions_of(is_on=False) is None
    with pytest.raises(BadRegionError, match="shared memory is off here; send the data itself"):
        for_caller(None, is_local=True)


def test_only_tandem_serve_on_loopback_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(REGIONS_FOLDER, raising=False)
    with pytest.raises(ConfigError, match="is for tandem serve"):
        regions_of(is_on=True)
    monkeypatch.setenv(REGIONS_FOLDER, str(tmp_path))
    assert for_caller(regions_of(is_on=True), is_local=True).status() == []


def test_the_setting_says_that_no_proxy_is_in_front() -> None:
    with pytest.raises(ValidationError, match="set shared_memory: unproxied"):
        Settings(shared_memory=True)
    assert not Settings().shared_memory


async def test_bytes_are_counted_before_memory_is_taken_for_them(tmp_path: Path) -> None:
    memory, budget = Memory(tmp_path), ByteBudget(2000)
    with (memory.folder / "k").open("wb") as file:
        file.truncate(2**40)  # sparse: to read it would end this process
    memory.regions.register("r", "k", 0, 2**40)

    async def load(num_bytes: int, share: Share) -> None:
        tensor = Tensor("pixels", "UINT8", (num_bytes,), region=RegionSlice("r", num_bytes))
        found = await loaded(tensor, memory.regions, 2**41, share)
        assert found.raw == bytes(num_bytes)

    with budget.share() as share:
        await load(1500, share)
        assert budget.num_held == 1500
        for num_bytes in (501, 2**40):
            with pytest.raises(OverloadedError, match="of at most 2000"):
                await load(num_bytes, share)
    assert budget.num_held == 0


async def test_what_is_long_is_read_on_a_thread(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    data = bytes(range(256)) * (LONG_BYTES // 256) + b"more"
    place = memory.region(data)
    tensor = Tensor("pixels", "UINT8", (len(data),), region=RegionSlice("r", len(data)))
    with ByteBudget(len(data)).share() as share:
        assert (await loaded(tensor, memory.regions, len(data), share)).raw == data
    place.unlink()
    with ByteBudget(len(data)).share() as share, pytest.raises(BadRegionError, match="No such"):
        await loaded(tensor, memory.regions, len(data), share)


def test_callers_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotLocalError, match="on the service's own machine"):
        for_caller(Memory(tmp_path).regions, is_local=False)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("0.0.0.0", False),
        ("fe80::1", False),
        ("localhost", False),
        ("", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_addresses_of_this_machine(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
