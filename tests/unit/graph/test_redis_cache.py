"""An image's key is of its bytes, and of everything that its answer depends on.

The shared store, whatever Redis does: right or nothing, soon, and never an error.

What comes back from a store that others can write to: right, or nothing. Gateways that share it.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from app.graph import redis_cache as keys_module
from app.graph.ensemble import CachedEnsemble
from app.graph.redis_cache import (
    HASHED_ON_LOOP_BYTES,
    KEY_BYTES,
    LIFE_S,
    MAX_UNWRITTEN,
    READ_S,
    VALUE_HEAD,
    ImageKeys,
    RedisStore,
    RowsFormat,
)
from app.graph.request import ClassifyRequest, ResponseCache
from app.setting_values import RedisAddress
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry import metric_table as table
from app.telemetry.metrics import RequestObserver, record_redis
from models.model_set import load_model_set
from tests.support.cached_service import ONE, TWO
from tests.support.cases import cases
from tests.support.fake_redis import FakeRedis
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.tiny_networks import write_tiny_set
from tests.support.virtual_loop import run_virtually


def keys_of(folder, **settings: object) -> ImageKeys:
    return ImageKeys(Settings(model_set=str(folder), **settings), load_model_set(str(folder)))


def test_one_bit_makes_another_key(tiny_set):
    keys = keys_of(tiny_set)
    found = {keys.key(data) for data in (b"", b"a", b"b", b"a\0", b"\0a")}
    assert len(found) == 5
    assert all(len(key) == KEY_BYTES for key in found)
    assert keys.key(b"a") == keys_of(tiny_set).key(b"a")


@cases(
    "changed",
    {"max_pixels": 1000, "max_full_pixels": 1000},
    {"max_full_pixels": 1000},
    {"icc_profiles": "convert"},
    ids=lambda changed: next(iter(changed)),
)
def test_a_setting_that_changes_answers_changes_keys(tiny_set, changed):
    assert keys_of(tiny_set).key(b"a") != keys_of(tiny_set, **changed).key(b"a")


def test_a_setting_that_changes_no_answer_does_not(tiny_set):
    assert keys_of(tiny_set).key(b"a") == keys_of(tiny_set, decode_threads=7).key(b"a")


def test_another_precision_changes_keys_even_of_the_same_network(tiny_set, tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", precision="FP16")
    assert keys_of(tiny_set).key(b"a") != keys_of(folder, precision="FP16").key(b"a")


def test_another_network_or_weight_changes_keys(tmp_path):
    folders = [
        write_tiny_set(tmp_path / "a", name="tiny"),
        write_tiny_set(tmp_path / "b", name="tiny", gains={"sure": 6.0, "unsure": 1.0}),
        write_tiny_set(tmp_path / "c", name="tiny", weights={"sure": 2.0, "unsure": 1.0}),
    ]
    assert len({keys_of(folder).key(b"a") for folder in folders}) == 3


@pytest.mark.parametrize("library", ["opencv-python-headless", "pillow", "pillow-heif", "openvino"])
def test_another_version_of_each_library_changes_keys(tiny_set, monkeypatch, library):
    """AVIF's pixels are Pillow's."""
    monkeypatch.setattr(keys_module, "version", lambda _: "1.0")
    before = keys_of(tiny_set).key(b"a")
    versions = {library: "1.1"}
    monkeypatch.setattr(keys_module, "version", lambda name: versions.get(name, "1.0"))
    assert keys_of(tiny_set).key(b"a") != before


@pytest.fixture
def handed_over(monkeypatch) -> list[object]:
    """What is called on a thread."""
    calls: list[object] = []
    real = asyncio.to_thread

    async def noted(call):
        calls.append(call)
        return await real(call)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    return calls


@pytest.mark.parametrize(("num_bytes", "is_on_loop"), [(250_000, True), (300_000, False)])
async def test_the_loop_hashes_about_a_quarter_of_a_mebibyte(
    tiny_set, handed_over, num_bytes, is_on_loop
):
    """Photos of small cameras, in less than half a millisecond."""
    await keys_of(tiny_set).of([bytes(num_bytes)])
    assert (handed_over == []) == is_on_loop


async def test_large_files_have_the_same_keys_from_a_thread(tiny_set, handed_over):
    keys = keys_of(tiny_set)
    small = [b"a", bytes(HASHED_ON_LOOP_BYTES - 1)]
    assert await keys.of(small) == [keys.key(data) for data in small]
    assert handed_over == []
    large = [*small, b"b"]
    assert await keys.of(large) == [keys.key(data) for data in large]
    assert len(handed_over) == 1


ADDRESS = RedisAddress.of("redis://user:s3cret@cache:6379/1")
FORM = RowsFormat("0123456789ab", (2,), 3)
ROWS = np.array([[0.1, 0.8, 0.1], [0.2, 0.5, 0.3]], np.float32)
KEYS = [bytes([number]) * 32 for number in range(4)]


class Shared:
    """A store, its Redis, and what it told of each image."""

    def __init__(self) -> None:
        self.redis, self.told = FakeRedis(), Counter[str]()
        self.store = RedisStore(ADDRESS, FORM, "tandem:", self._count, lambda _: self.redis)

    def _count(self, result: str, number: int) -> None:
        self.told[result] += number

    async def write(self, *keys: bytes) -> None:
        for key in keys:
            self.store.write(key, ROWS)
        await self.store.written()


@pytest.fixture
def shared() -> Shared:
    return Shared()


async def test_what_was_written_is_read(shared):
    await shared.write(*KEYS[:2])
    first, absent, second = await shared.store.read([KEYS[0], KEYS[2], KEYS[1]])
    assert absent is None
    for rows in (first, second):
        assert rows is not None
        assert rows.tobytes() == ROWS.tobytes()
    assert shared.told == {"written": 2, "hit": 2, "miss": 1}
    assert shared.redis.num_writes == 1  # both in one call
    assert set(shared.redis.lives_s.values()) == {LIFE_S}


@cases(
    "poison", b"", b"x", bytes(len(FORM.pack(KEYS[1], ROWS))), FORM.pack(KEYS[1], ROWS), "a text", 7
)
async def test_a_poisoned_value_is_a_miss(shared, poison):
    await shared.write(KEYS[0])
    (name,) = shared.redis.values
    shared.redis.values[name] = poison
    assert await shared.store.read(KEYS[:1]) == [None]
    assert shared.told["bad"] == 1
    await shared.write(KEYS[0])  # and it is written anew
    assert (await shared.store.read(KEYS[:1]))[0] is not None


@pytest.mark.parametrize("error", [ConnectionError("refused"), OSError(), ValueError("a reply")])
async def test_gone_it_is_left_alone_and_told_of_once(shared, error, caplog):
    shared.redis.raises = error
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert await shared.store.read(KEYS[:2]) == [None, None]
    assert (shared.redis.num_reads, shared.told) == (1, {"failed": 2, "skipped": 8})
    (record,) = caplog.records
    assert "redis://cache:6379/1" in record.getMessage()
    assert "s3cret" not in record.getMessage()


def test_back_again_it_is_used_again(shared):
    async def play() -> None:
        await shared.write(KEYS[0])
        shared.redis.raises = ConnectionError("gone")
        await shared.store.read(KEYS[:1])
        shared.redis.raises = None
        shared.store._reads._clock = asyncio.get_running_loop().time
        shared.store._reads._next_trial = 5.0
        assert await shared.store.read(KEYS[:1]) == [None]
        await asyncio.sleep(5)
        assert (await shared.store.read(KEYS[:1]))[0] is not None

    run_virtually(play())


def test_slow_it_costs_a_request_no_more_than_its_limit(shared):
    async def play() -> float:
        shared.redis.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        reads = [shared.store.read(KEYS[:1]) for _ in range(20)]
        assert await asyncio.gather(*reads) == [[None]] * 20
        taken = asyncio.get_running_loop().time() - began
        assert await shared.store.read(KEYS[:1]) == [None]  # the circuit is open: at once
        return taken

    assert run_virtually(play()) == pytest.approx(READ_S)
    assert shared.told == {"failed": 20, "skipped": 1}


async def test_full_it_is_still_read(shared):
    await shared.write(KEYS[0])
    shared.redis.write_raises = RuntimeError("OOM command not allowed")
    await shared.write(KEYS[1])
    await shared.write(KEYS[2])
    assert shared.told["unwritten"] == 2
    assert shared.redis.num_writes == 2  # the second was not tried
    assert (await shared.store.read(KEYS[:1]))[0] is not None


async def test_what_waits_to_be_written_is_bounded(shared):
    shared.redis.gate = asyncio.Event()
    for number in range(2 * MAX_UNWRITTEN):
        shared.store.write(number.to_bytes(32, "big"), ROWS)
        if number == 10:
            await asyncio.sleep(0)
    assert len(shared.store._unwritten) <= MAX_UNWRITTEN
    shared.redis.gate.set()
    await shared.store.written()
    assert shared.told["written"] + shared.told["unwritten"] == 2 * MAX_UNWRITTEN
    assert len(shared.redis.values) == shared.told["written"]


async def test_a_request_that_is_cancelled_is_no_failure_of_redis(shared):
    shared.redis.gate = asyncio.Event()
    read = asyncio.create_task(shared.store.read(KEYS[:1]))
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert not shared.store._reads.is_open


KEY, OTHER_KEY = b"k" * 32, b"o" * 32
FORM_VALUES = RowsFormat("0123456789ab", (1, 2), 3)  # one: of a cascade
NUM_BYTES = len(FORM_VALUES.pack(KEY, ROWS))
BOUNDED = settings(max_examples=300, database=None)
PROBABILITY = st.floats(0, 1, width=32)


@BOUNDED
@given(
    rows=arrays(np.float32, st.sampled_from([(1, 3), (2, 3)]), elements=PROBABILITY),
    key=st.binary(min_size=32, max_size=32),
)
def test_what_was_packed_is_read_to_the_last_bit(rows, key):
    read = FORM_VALUES.read(key, FORM_VALUES.pack(key, rows))
    assert read is not None
    assert (read.dtype, read.shape) == (np.float32, rows.shape)
    assert read.tobytes() == rows.tobytes()


@BOUNDED
@given(data=st.binary(max_size=2 * NUM_BYTES))
def test_any_bytes_are_a_miss(data):
    assert FORM_VALUES.read(KEY, data) is None


def test_a_value_that_is_cut_or_longer_is_a_miss():
    data = FORM_VALUES.pack(KEY, ROWS)
    assert all(FORM_VALUES.read(KEY, data[:end]) is None for end in range(len(data)))
    assert FORM_VALUES.read(KEY, data + b"\0") is None


def test_a_value_with_one_bit_changed_is_a_miss():
    data = FORM_VALUES.pack(KEY, ROWS)
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        assert FORM_VALUES.read(KEY, bytes(changed)) is None, place


@cases(
    "form, key, rows",
    (RowsFormat("0123456789ab", (2,), 3), KEY, ROWS[:1]),  # so many rows has no image
    (FORM_VALUES, OTHER_KEY, ROWS),
    (RowsFormat("ba9876543210", (2,), 3), KEY, ROWS),
    (RowsFormat("0123456789ab", (3,), 2), KEY, ROWS),
    ids=["rows", "image", "set", "shape"],
)
def test_a_value_of_something_else_is_a_miss(form, key, rows):
    assert form.read(key, FORM_VALUES.pack(KEY, rows)) is None


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.1, 1.5])
def test_numbers_that_are_no_probabilities_are_a_miss(wrong):
    """With a checksum that is right: whoever wrote it knew how."""
    rows = ROWS.copy()
    rows[1, 2] = wrong
    assert FORM_VALUES.read(KEY, FORM_VALUES.pack(KEY, rows)) is None


def test_the_head_is_small():
    assert VALUE_HEAD.size <= 48


class Gateway:
    """One of those that share ``redis``."""

    def __init__(self, tiny_set, redis, monkeypatch, **options):
        monkeypatch.setattr("app.graph.redis_cache.client_of", lambda _: redis)
        settings = Settings(model_set=str(tiny_set), cache="redis://cache:6379/0", **options)
        self.members = {"sure": FakeMember(), "unsure": FakeMember((0.5, 0.3, 0.2))}
        self.service = service_of(settings, FakeDecoder(), self.members, Combiner(settings))
        graph = self.service._graph
        assert isinstance(graph, CachedEnsemble)
        self.cache = graph.cache
        self.store = self.cache._shared
        assert isinstance(self.store, RedisStore)

    async def cached(self, *files: bytes, **options: Any) -> list[bool]:
        options = {"plan": self.service.settings.plan} | options
        request = ClassifyRequest(list(files), 3, 10.0, "id", RequestObserver(), **options)
        answers = await self.service.classify(request)
        await self.store.written()
        assert all(answer.predictions[0].probability > 0.4 for answer in answers)
        return [bool(answer.cached) for answer in answers]

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.members["sure"].seen))


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def gateways(tiny_set, redis, monkeypatch) -> list[Gateway]:
    return [Gateway(tiny_set, redis, monkeypatch) for _ in range(3)]


async def test_each_file_of_a_form_is_looked_for_and_all_in_one_call(gateways, redis, told):
    one, other, _ = gateways
    await one.cached(ONE)
    assert await other.cached(TWO, ONE, TWO) == [False, True, True]
    assert redis.num_reads == 2
    assert told.of(table.CACHE_LOOKUPS) == {("miss",): 2, ("hit",): 1, ("shared",): 1}
    assert other.num_computed == 1
    assert await other.cached(ONE, TWO) == [True, True]  # from its own memory now
    assert redis.num_reads == 2


async def test_identical_images_are_looked_for_once(gateways, redis):
    one, other, _ = gateways
    await one.cached(ONE)
    redis.gate = asyncio.Event()
    requests = [asyncio.create_task(other.cached(ONE)) for _ in range(5)]
    while redis.num_reads < 2:
        await asyncio.sleep(0)
    redis.gate.set()
    assert await asyncio.gather(*requests) == [[True]] * 5
    assert (redis.num_reads, other.num_computed) == (2, 0)


async def test_one_that_is_cancelled_while_it_looks_leaves_it_to_the_next(gateways, redis):
    one, other, _ = gateways
    await one.cached(ONE)
    redis.gate = asyncio.Event()
    first, second = (asyncio.create_task(other.cached(ONE)) for _ in range(2))
    while redis.num_reads < 2:
        await asyncio.sleep(0)
    first.cancel()
    redis.gate.set()
    assert await second == [True]
    assert len(other.cache._flights) == 0


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError(), ValueError("odd")])
async def test_redis_in_trouble_is_no_requests_trouble(gateways, redis, error, told):
    redis.raises = error
    one, other, _ = gateways
    assert await one.cached(ONE, TWO) == [False, False]
    assert await one.cached(ONE, TWO) == [True, True]
    assert await other.cached(ONE) == [False]
    assert {result for (result,) in told.of(table.CACHE_REDIS)} == {"failed", "unwritten"}


async def test_what_a_plan_was_sure_of_is_shared(with_plan, redis, monkeypatch):
    one, other = (Gateway(with_plan, redis, monkeypatch, plan="fast") for _ in range(2))
    one.members["sure"].rows = other.members["sure"].rows = {len(TWO): (0.5, 0.4, 0.1)}
    assert await one.cached(ONE, TWO) == [False, False]
    assert await other.cached(ONE, TWO) == [True, True]
    assert (one.members["unsure"].seen, other.num_computed) == ([[len(TWO)]], 0)


async def test_what_a_client_wants_anew_is_written_and_not_read_and_the_rest_not_kept(
    gateways, redis
):
    one, other, third = gateways
    assert await other.cached(ONE, cache_use="off") == [False]
    assert redis.values == {}
    assert await one.cached(ONE, cache_use="renew") == [False]
    assert await other.cached(ONE, cache_use="off") == [False]
    assert redis.num_reads == 0
    assert await third.cached(ONE) == [True]


async def test_names_there_tell_the_model_set(gateways, redis):
    await gateways[0].cached(ONE)
    (name,) = redis.values
    fingerprint = gateways[0].service._graph.keys.fingerprint
    assert name.startswith(f"tandem:1:{fingerprint}:")


def test_without_redis_there_is_no_store():
    assert asyncio.run(ResponseCache(1000).fetch({0: None})) == {}
    store = RedisStore(ADDRESS, RowsFormat("", (1,), 1), "", record_redis, lambda _: FakeRedis())
    asyncio.run(store.written())  # of nothing
