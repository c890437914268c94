"""The decoding processes of a Gateway together: started when needed, each photo to the freest."""

import asyncio

import pytest

from app.decoding import pool
from app.decoding.pool import DecodeProcesses, num_processes
from models.image import ImageRule


class FakeProcess:
    """A process that is ready when a test says so, and answers nothing."""

    def __init__(self, _rules: object, _pixels: int, _full: int, on_end: object) -> None:
        self.on_end, self.is_ready, self.num_open = on_end, False, 0
        self.num_started = self.num_hung = 0
        self.cpu_s, self.is_closed = 1.5, False

    def start(self) -> None:
        self.num_started += 1

    def submit(self, data: bytes) -> "asyncio.Future[None]":
        self.num_open += 1
        return asyncio.get_running_loop().create_future()

    def end_if_hung(self) -> None:
        self.num_hung += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def processes(monkeypatch) -> DecodeProcesses:
    monkeypatch.setattr(pool, "DecodeProcess", FakeProcess)
    return DecodeProcesses(3, (ImageRule(16, 20),), 10, 10)


async def test_they_are_started_when_there_first_is_a_photo(processes):
    assert [one.num_started for one in processes._all] == [0, 0, 0]
    assert processes.submit(b"photo") is None
    assert [one.num_started for one in processes._all] == [1, 1, 1]


async def test_a_photo_goes_to_the_process_with_the_fewest(processes):
    for one in processes._all[1:]:
        one.is_ready = True
    given = [processes.submit(b"photo") for _ in range(5)]
    assert all(given)
    assert [one.num_open for one in processes._all] == [0, 3, 2]
    assert processes._all[0].num_started == 5  # it may have died
    assert (processes.num_open, processes.num_busy) == (5, 2)


async def test_what_concerns_all_is_asked_of_all(processes):
    told = []
    processes.tell(lambda: told.append(processes.num_open))
    processes._all[1].on_end()
    assert told == [0]
    processes.end_hung()
    assert [one.num_hung for one in processes._all] == [1, 1, 1]
    assert processes.cpu_s == 4.5
    processes.close()
    assert all(one.is_closed for one in processes._all)


@pytest.mark.parametrize(
    ("asked", "cores", "num"),
    [(None, 1, 1), (None, 4, 1), (None, 5, 2), (None, 32, 8), (0, 32, 0), (3, 1, 3)],
)
def test_there_is_one_for_every_four_cores_unless_asked_otherwise(asked, cores, num):
    assert num_processes(asked, cores) == num
