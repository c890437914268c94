"""The Classifier on a tiny network: each image its own row, and a caller that leaves."""

import asyncio
import re
import threading

import numpy as np
import pytest

from app.deployments import classifier as module
from app.deployments.classifier import Classifier
from app.errors import ConfigError, DeadlineError, OverloadedError
from app.settings import Settings
from calibration.evaluation.temperatures import with_temperatures
from calibration.sets.durable import write_manifest
from models.errors import ModelSetError
from models.golden import GoldenMismatchError
from models.manifest import read_manifest
from tests.support.tiny_networks import (
    COLORS,
    SIZE,
    take_golden,
    write_opposite_sets,
    write_tiny_set,
)


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
    image = {"input_size": 32, "resize_shorter": 32}
    other = write_tiny_set(tmp_path / "other", image=image)
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


@pytest.mark.parametrize(
    ("user_config", "refusal"),
    [
        ({"max_batch_size": 0}, "user_config.max_batch_size: Input should be greater"),
        ({"max_batch": 4}, "user_config.max_batch: Extra inputs are not permitted; it has max_"),
        ({"max_queued_images": "many"}, "user_config.max_queued_images: Input should be a valid"),
        ({"max_queued_images": 84}, "user_config: max_files is 64, and of max_queued_images 84"),
    ],
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


async def test_no_larger_batches_if_they_are_not_wanted(tiny_set):
    classifier = Classifier(settings(tiny_set, backlog_batches=False), "sure")
    assert await sizes_of_backlogs(classifier) == {4}


async def test_no_larger_batches_where_memory_is_short(tiny_set, monkeypatch, caplog):
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
