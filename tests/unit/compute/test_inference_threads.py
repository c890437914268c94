"""How a replica's cores become threads."""

import asyncio
import threading

import pytest

from app.compute.inference_threads import (
    InferenceThreads,
    inference_threads_for,
    on_own_thread,
    replica_inference_threads,
)
from app.settings import Settings

STREAMS = Settings().streams


@pytest.mark.parametrize(
    ("cores", "streams", "num", "threads_each"),
    [
        (2, 0, 2, 1),  # one batch on every core
        (2, 1, 1, 2),  # one batch on all
        (8, 2, 2, 4),
        (8, 3, 3, 2),  # two cores are left over
        (2, 9, 2, 1),  # no more than there are
        (1, 0, 1, 1),
    ],
)
def test_cores_are_shared_out(cores: int, streams: int, num: int, threads_each: int) -> None:
    threads = inference_threads_for(cores, streams)
    assert (threads.num, threads.threads_each) == (num, threads_each)


@pytest.mark.parametrize(("cpus", "sharing", "cores"), [(8, 1, 8), (8, 2, 4), (1, 2, 1), (3, 2, 1)])
def test_without_whole_cpus_the_machine_is_divided(monkeypatch, cpus, sharing, cores) -> None:
    monkeypatch.setattr("app.compute.inference_threads.available_cpus", lambda: cpus)
    assert replica_inference_threads(STREAMS, sharing).num == cores


@pytest.mark.parametrize(("assigned", "cores"), [(3, 3), (8, 4), (0, 4)])
def test_whole_cpus_count_as_far_as_they_are_there(monkeypatch, caplog, assigned, cores) -> None:
    monkeypatch.setattr("app.compute.inference_threads.available_cpus", lambda: 4)
    monkeypatch.setattr("app.compute.inference_threads._whole_cpus", lambda: assigned)
    assert replica_inference_threads(STREAMS, 1).num == cores
    assert ("it uses those" in caplog.text) is (assigned > 4)


def test_too_many_streams_are_told(monkeypatch, caplog) -> None:
    monkeypatch.setattr("app.compute.inference_threads.available_cpus", lambda: 2)
    assert replica_inference_threads(5).num == 2
    assert "num_cpus 0, streams 5, but this replica has 2 cores" in caplog.text


async def test_as_many_run_at_a_time_as_there_are() -> None:
    threads, meeting = InferenceThreads(2), threading.Barrier(2, timeout=10)
    assert await asyncio.gather(*(threads.run(lambda n: meeting.wait() * 0 + n, i) for i in (1, 2)))


def test_with_threads_apart_no_batch_is_formed_ahead() -> None:
    """It would begin at once on the other threads: more batches than cores."""
    threads = InferenceThreads(2)
    assert threads.scheduler.num_ahead == 2
    assert threads.apart().scheduler is threads.scheduler
    assert threads.scheduler.num_ahead == 0


def test_what_is_taken_ahead_begins_when_a_thread_is_free_in_order() -> None:
    threads, began, may_end = InferenceThreads(1), [], threading.Event()

    def work(number: int) -> int:
        began.append(number)
        may_end.wait(10)
        return number

    async def run() -> list[int]:
        runs = [asyncio.ensure_future(threads.run(work, number)) for number in range(3)]
        while not began:
            await asyncio.sleep(0.001)
        assert began == [0]
        may_end.set()
        return await asyncio.gather(*runs)

    assert asyncio.run(run()) == [0, 1, 2]
    assert began == [0, 1, 2]


async def ended(thread: threading.Thread) -> None:
    async with asyncio.timeout(30):
        while thread.is_alive():
            await asyncio.sleep(0.001)


async def test_the_result_and_the_end_of_the_thread() -> None:
    thread = await on_own_thread("load", threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.name.startswith("load")
    await ended(thread)


async def test_an_error_is_the_callers() -> None:
    threads = []

    def work() -> None:
        threads.append(threading.current_thread())
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await on_own_thread("load", work)
    await ended(threads[0])


async def test_work_goes_on_without_its_caller() -> None:
    may_end, has_begun, has_ended = (threading.Event() for _ in range(3))

    def work() -> None:
        has_begun.set()
        may_end.wait()
        has_ended.set()

    caller = asyncio.create_task(on_own_thread("load", work))
    await asyncio.to_thread(has_begun.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    assert await asyncio.to_thread(has_ended.wait, 30)
