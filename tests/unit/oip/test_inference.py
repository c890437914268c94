"""Tensors in shared memory are read under the byte budget, long ones on a thread."""

import pytest

from app.errors import BadRegionError, OverloadedError
from app.oip.inference import LONG_BYTES, loaded
from app.oip.tensors import RegionSlice, Tensor
from app.queueing.admission import ByteBudget, Share
from tests.support.shared_regions import Memory


async def test_bytes_are_counted_before_memory_is_taken_for_them(tmp_path):
    memory, budget = Memory(tmp_path), ByteBudget(2000)
    with (memory.folder / "k").open("wb") as file:
        file.truncate(2**40)  # sparse: to read it would end this process
    memory.regions.register("r", "k", 0, 2**40)

    async def load(num_bytes: int, share: Share) -> None:
        tensor = Tensor("pixels", "UINT8", (num_bytes,), region=RegionSlice("r", num_bytes))
        assert (await loaded(tensor, memory.regions, 2**41, share)).raw == bytes(num_bytes)

    with budget.share() as share:
        await load(1500, share)
        assert budget.num_held == 1500
        for num_bytes in (501, 2**40):
            with pytest.raises(OverloadedError, match="of at most 2000"):
                await load(num_bytes, share)
    assert budget.num_held == 0


async def test_what_is_long_is_read_on_a_thread(tmp_path):
    memory = Memory(tmp_path)
    data = bytes(range(256)) * (LONG_BYTES // 256) + b"more"
    place = memory.region(data)
    tensor = Tensor("pixels", "UINT8", (len(data),), region=RegionSlice("r", len(data)))
    with ByteBudget(len(data)).share() as share:
        assert (await loaded(tensor, memory.regions, len(data), share)).raw == data
    place.unlink()
    with ByteBudget(len(data)).share() as share, pytest.raises(BadRegionError, match="No such"):
        await loaded(tensor, memory.regions, len(data), share)
