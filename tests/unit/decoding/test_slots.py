"""The shared memory and the messages of a Gateway and its decoding processes."""

import os
from collections.abc import Iterator

import pytest

from app.decoding.slots import NUM_SLOTS, Job, Reply, Slots, jobs, replies, slot_bytes
from app.decoding.small import SMALL_BYTES

IMAGE_BYTES = 300


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, NUM_SLOTS * slot_bytes(IMAGE_BYTES))
    yield descriptor
    os.close(descriptor)


def test_what_one_end_writes_the_other_reads(memory):
    ours, its = Slots(memory, IMAGE_BYTES), Slots(memory, IMAGE_BYTES)
    last, largest = NUM_SLOTS - 1, bytes(range(256)) * (SMALL_BYTES // 256)
    for slot, data in [(0, b"first"), (1, largest), (last, b"last")]:
        ours.put_file(slot, data)
        its.image(slot)[:] = bytes([slot]) * IMAGE_BYTES
    assert its.file(0, 5) == b"first"
    assert its.file(1, SMALL_BYTES) == largest
    assert its.file(last, 4) == b"last"
    for slot in (0, 1, last):  # no slot reaches into the next
        assert bytes(ours.image(slot)) == bytes([slot]) * IMAGE_BYTES


def test_a_slot_says_whether_it_is_worked_on(memory):
    ours, its = Slots(memory, IMAGE_BYTES), Slots(memory, IMAGE_BYTES)
    ours.put_file(3, b"data")
    assert not ours.has_begun(3)
    its.begin(3)
    assert ours.has_begun(3)
    assert not ours.has_begun(2)
    its.end(3)
    assert not ours.has_begun(3)
    its.begin(3)
    ours.put_file(3, b"next")  # of a process that died: the slot is used again
    assert not its.has_begun(3)


def test_memory_costs_only_where_it_is_used(memory):
    Slots(memory, IMAGE_BYTES).put_file(0, b"data")
    assert os.fstat(memory).st_blocks * 512 <= 2 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("step", [1, 7, 8, 11, 1000])
def test_messages_come_whole_however_a_stream_cuts_them(step):
    given = [Job(slot, 1000 + slot) for slot in range(20)]
    stream, coming, found = b"".join(job.pack() for job in given), jobs(), []
    for at in range(0, len(stream), step):
        found += coming.feed(stream[at : at + step])
    assert found == given


def test_a_reply_is_read_as_it_was_written():
    reply = Reply(5, True, 12.25, 12.5, 640, 480, 3.75)
    assert replies().feed(reply.pack() + Reply(6).pack()) == [reply, Reply(6)]
