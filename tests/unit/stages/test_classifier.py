"""The Classifier on a tiny network: each image its own row, callers that leave, direct calls."""

import asyncio
import re
import threading

import numpy as np
import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from app.errors import ConfigError, DeadlineError, OtherSetError, OverloadedError
from app.queueing.admission import Usage
from app.queueing.fairness import CoreShare
from app.queueing.scheduler import BatchResult, ExecutedBatch, Waiting
from app.settings import Settings
from app.stages import classifier as module
from app.stages.classifier import Classifier, MemberCall
from app.stages.decoder import Decoder
from calibration.evaluation.fitting import with_temperatures
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.golden import GoldenMismatchError
from models.manifest import read_manifest
from tests.support.cases import cases
from tests.support.tiny_networks import (
    COLORS,
    SIZE,
    picture,
    take_golden,
    write_opposite_sets,
    write_tiny_set,
)

BATCH = ExecutedBatch(0.0, 1.0, ())
IMAGE = np.zeros((1, 1, 3), np.uint8)


def settings(folder, **changes: object) -> Settings:
    return Settings(
        model_set=str(folder), batch_sizes=(1, 4), streams=1, compile_cache=None
    ).model_copy(update=changes)


def images(*colors: str) -> np.ndarray:
    return np.array([np.full((SIZE, SIZE, 3), COLORS[c], np.uint8) for c in colors])


async def test_every_image_has_its_own_row(tiny_set):
    classifier = Classifier(settings(tiny_set), "sure")
    colors = ["red", "blue", "green", "red", "red", "blue"]
    answer = await classifier.classify(images(*colors), 10.0)
    assert [list(COLORS)[i] for i in answer.probabilities.argmax(1)] == colors
    assert answer.probabilities.dtype == np.float32
    assert answer.batch_size == (4, 4, 4, 4, 1, 1)  # 1 and 4 are compiled: nothing is padded
    assert all(ms > 0 for ms in answer.infer_ms)
    assert all(ms >= 0 for ms in answer.queue_ms)


async def test_too_many_images_and_no_time(tiny_set):
    classifier = Classifier(settings(tiny_set, max_queued_images=2), "sure")
    with pytest.raises(OverloadedError, match="3 more exceed the limit of 2"):
        await classifier.classify(images("red", "red", "red"), 10.0)
    with pytest.raises(DeadlineError, match="no time is left"):
        await classifier.classify(images("red"), -1.0)
    assert len((await classifier.classify(images("red", "blue"), 10.0)).probabilities) == 2


async def test_what_a_caller_that_left_had_queued_is_dropped(tiny_set):
    classifier = Classifier(settings(tiny_set, max_queued_images=8), "sure")
    leaving = asyncio.ensure_future(classifier.classify(images(*["red"] * 6), 10.0))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    answer = await classifier.classify(images(*["green"] * 6), 10.0)  # all places are free
    assert len(answer.probabilities) == 6


def test_a_set_that_does_not_fit_is_refused_at_the_start(tmp_path, tiny_set):
    with pytest.raises(ModelSetError, match="no member 'resnet50'"):
        Classifier(settings(tiny_set), "resnet50")
    other = write_tiny_set(tmp_path / "other", image={"input_size": 32, "resize_shorter": 32})
    with pytest.raises(ModelSetError, match="the network takes 16x16"):
        Classifier(settings(other), "sure")
    (other / "sure.bin").write_bytes(b"")
    with pytest.raises(ModelSetError, match=r"sure\.bin was altered"):
        Classifier(settings(other), "sure")


async def test_settings_change_without_a_restart(tiny_set):
    classifier = Classifier(settings(tiny_set, batch_sizes=(1, 2, 4), max_files=2), "sure")
    classifier.reconfigure({"max_batch_size": 2, "max_queued_images": 3})
    answer = await classifier.classify(images("red", "blue", "green"), 10.0)
    assert answer.batch_size == (2, 2, 1)
    with pytest.raises(OverloadedError, match="4 more exceed the limit of 3"):
        await classifier.classify(images(*["red"] * 4), 10.0)
    classifier.reconfigure({"max_batch_size": 99, "max_queued_images": 6})  # 4 is compiled
    answer = await classifier.classify(images("red", "blue", "green", "red", "red"), 10.0, "bulk")
    assert answer.batch_size == (4, 4, 4, 4, 1)


@cases(
    "user_config, refusal",
    ({"max_batch_size": 0}, "user_config.max_batch_size: Input should be greater"),
    ({"max_batch": 4}, "user_config.max_batch: Extra inputs are not permitted; it has max_"),
    ({"max_queued_images": "many"}, "user_config.max_queued_images: Input should be a valid"),
    ({"max_queued_images": 84}, "user_config: max_files is 64, and of max_queued_images 84"),
)
def test_settings_that_are_none_change_nothing(tiny_set, user_config, refusal):
    classifier = Classifier(settings(tiny_set), "sure")
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        classifier.reconfigure({"max_batch_size": 2} | user_config)
    assert classifier._queue.max_batch_size == 4


def test_a_network_that_answers_otherwise_does_not_start(tmp_path):
    one, two = write_opposite_sets(tmp_path)
    Classifier(settings(one), "sure")
    (one / "golden.json").write_bytes((two / "golden.json").read_bytes())
    with pytest.raises(ModelSetError, match="was altered"):
        Classifier(settings(one), "sure")
    take_golden(one, two)
    with pytest.raises(GoldenMismatchError, match="sure INT8 does not answer"):
        Classifier(settings(one), "sure")


BACKLOG = images(*(["red", "blue", "green"] * 12))  # above 2 places x 2 x 4, whatever was taken


async def sizes_of_backlogs(classifier: Classifier) -> set[int]:
    """Send backlogs until the thread that compiles has ended; return the sizes of later batches."""
    expected = [index % 3 for index in range(len(BACKLOG))]
    order = [list(COLORS).index(color) for color in ("red", "blue", "green")]
    found: set[int] = set()
    for _ in range(2):
        answer = await classifier.classify(BACKLOG, 10.0)
        assert answer.probabilities.argmax(1).tolist() == [order[i] for i in expected]
        found = set(answer.batch_size)
        while any(thread.name.startswith("compile") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    return found


async def test_a_backlog_has_larger_batches_too(tiny_set):
    classifier = Classifier(settings(tiny_set), "sure")
    assert 8 in await sizes_of_backlogs(classifier)
    classifier.reconfigure({"max_batch_size": 99})  # 4 is the largest of the settings
    assert classifier._queue.max_batch_size == 4


async def test_no_larger_batches_if_unwanted_or_memory_is_short(tiny_set, monkeypatch, caplog):
    classifier = Classifier(settings(tiny_set, backlog_batches=False), "sure")
    assert await sizes_of_backlogs(classifier) == {4}
    monkeypatch.setattr(module, "free_memory", lambda: 400 * 10**6)
    assert await sizes_of_backlogs(Classifier(settings(tiny_set), "sure")) == {4}
    assert "sure: cannot prepare batches of 8: 400 MB are free, it takes up to " in caplog.text


async def test_no_larger_batches_of_another_network(tmp_path, caplog):
    folder = write_tiny_set(tmp_path / "set")
    classifier = Classifier(settings(folder), "sure")
    weights = folder / "sure.bin"
    weights.write_bytes(weights.read_bytes()[::-1])  # as an update of the set may
    assert await sizes_of_backlogs(classifier) == {4}
    assert "sure: cannot prepare batches of 8: " in caplog.text
    assert "sure.bin was altered" in caplog.text


async def test_no_larger_batches_that_answer_otherwise(tmp_path, monkeypatch, caplog):
    one, _ = write_opposite_sets(tmp_path)  # with golden answers
    classifier = Classifier(settings(one), "sure")

    def check(*_: object) -> None:
        raise GoldenMismatchError("it does not answer as it did")

    monkeypatch.setattr("models.golden.check", check)
    assert await sizes_of_backlogs(classifier) == {4}
    assert "sure: cannot prepare batches of 8: it does not answer as it did" in caplog.text
    assert classifier._network.batch_sizes == (1, 4)


async def test_rows_have_the_members_temperature(tmp_path):
    folder = write_tiny_set(tmp_path / "set")
    plain = await Classifier(settings(folder), "unsure").classify(images("red", "blue"), 10.0)
    names = {"sure": 1.0, "unsure": 0.5, "ensemble": 1.0}
    write_manifest(folder, with_temperatures(read_manifest(folder), names))
    found = await Classifier(settings(folder), "unsure").classify(images("red", "blue"), 10.0)
    squares = plain.probabilities**2
    expected = squares / squares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)


def result(value: float) -> BatchResult:
    return BatchResult(np.array([value], np.float32), 0.5, BATCH)


class Heard:
    """A traced call of so many images, and what its spans record when it is over."""

    def __init__(self, num_images: int) -> None:
        self.ends: list = []
        self.usage = Usage(1, 1.0)
        self.call = MemberCall(self, self.usage, num_images, "of this set")  # type: ignore[arg-type]
        self.call.parent = INVALID_SPAN_CONTEXT
        self.entries = [Waiting(IMAGE, self.call, 0.0, 1.0, CoreShare()) for _ in range(num_images)]
        self.call.entries = list(self.entries)

    @property
    def left(self) -> list[Waiting]:
        """Those without an outcome that are dropped in their turn."""
        return [e for e in self.entries if e.is_over and e.result is None and e.error is None]

    def answered(self, parent, results):
        self.ends.append((results, None))

    def failed(self, parent: SpanContext, arrived: float, error: BaseException) -> None:
        self.ends.append((None, error))


async def test_results_come_in_order_once_all_are_there():
    heard = Heard(3)
    for i in (2, 0):
        heard.entries[i].end(result(i))
    assert heard.ends == []
    assert not heard.call.done()
    heard.entries[1].end(result(1))
    ((_, error),) = heard.ends
    assert error is None
    assert (await heard.call).probabilities.tolist() == [[0], [1], [2]]


async def test_the_first_error_ends_the_call_and_the_others_leave_the_queue():
    heard = Heard(3)
    heard.entries[0].end(result(0))
    heard.entries[1].end(None, ValueError("first"))
    ((results, error),) = heard.ends
    assert results is None
    assert (str(error), heard.left) == ("first", [heard.entries[2]])
    with pytest.raises(ValueError, match="first"):
        await heard.call


async def test_a_call_that_is_cancelled_leaves_the_queue_and_is_told_once():
    heard = Heard(2)
    assert heard.call.cancel()
    assert not heard.call.cancel()
    ((results, error),) = heard.ends
    assert results is None
    assert isinstance(error, asyncio.CancelledError)
    assert heard.left == heard.entries
    with pytest.raises(asyncio.CancelledError):
        await heard.call


@pytest.mark.parametrize("late", ["result", "error"])
async def test_what_comes_after_the_end_is_not_told(late):
    heard = Heard(2)
    heard.entries[0].end(None, ValueError("first"))
    if late == "result":
        heard.entries[1].end(result(1))
    else:
        heard.entries[1].end(None, ValueError("second"))
    assert len(heard.ends) == 1
    assert isinstance(heard.call.exception(), ValueError)


async def test_an_image_is_told_of_once():
    heard = Heard(1)
    heard.entries[0].end(result(0))
    heard.entries[0].end(None, ValueError("second"))
    assert len(heard.ends) == 1
    assert heard.call.done()


@pytest.mark.parametrize("ends_well", [True, False])
async def test_its_images_are_under_way_until_it_ends(ends_well):
    heard = Heard(2)
    assert heard.usage.num_under_way == 2
    for entry in heard.entries:
        entry.end(result(1) if ends_well else None, None if ends_well else ValueError("bad"))
    assert heard.usage.num_under_way == 0
    assert heard.usage.figures()["images_done"] == (2 if ends_well else 0)
    assert isinstance(heard.call.exception(), type(None) if ends_well else ValueError)


async def test_a_member_refuses_images_of_another_size(tmp_path):
    settings = Settings(
        model_set=str(write_tiny_set(tmp_path / "tiny", size=24)),
        batch_sizes=(1,),
        compile_cache=None,
    )
    small = (await Decoder(settings).decode([picture()])).images[:, :16, :16]
    with pytest.raises(OtherSetError):
        await Classifier(settings, "sure").classify(small, 10.0)
