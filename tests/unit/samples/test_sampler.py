"""Samples are written off the event loop: full queues and broken places cost no answer."""

import json
import logging
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.messages import Fault
from app.metrics.table import SAMPLES
from app.samples import sampler
from app.samples.places import SampleFolder
from app.samples.sample import Sample, is_chosen
from app.samples.sampler import Sampler, disagreement_sampler_of, sampler_of
from app.settings import Settings
from tests.support.answers import answer_of
from tests.support.instruments import Instruments

WITHIN_S = 30.0
FAULT = Fault(400, "not_an_image", "these bytes are no image")


class Results:
    """The results that a sampler tells, and a wait for as many as a test expects."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __call__(self, result: str) -> None:
        with self._changed:
            self.counts[result] += 1
            self._changed.notify_all()

    def wait(self, number: int) -> Counter[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.counts.total() >= number, WITHIN_S)
        return self.counts


class Place:
    """Keeps samples in memory; waits for ``gate``, and raises while it ``is_broken``."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def write(self, sample: Sample) -> bool:
        assert self.gate.wait(WITHIN_S)
        self.threads.add(threading.current_thread().name)
        if self.is_broken:
            raise OSError(28, "No space left on device")
        self.samples.append(sample)
        return True


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def place() -> Place:
    return Place()


def test_images_with_an_answer_are_kept_on_another_thread(place: Place, results: Results) -> None:
    kept = Sampler(1.0, place, results, lambda: datetime(2026, 1, 2, tzinfo=UTC))
    kept.note("id", [b"a", b"b", b"c"], [answer_of(), FAULT, answer_of()])
    kept.note("pixels", [], [answer_of()])
    assert results.wait(2) == {"written": 2}
    assert [sample.image for sample in place.samples] == [b"a", b"c"]
    assert b'"image":2' in place.samples[1].text
    assert place.threads == {"samples"}
    assert all(sample.stem.startswith("20260102T000000") for sample in place.samples)


def test_a_disagreement_is_kept_whatever_the_ratio(place: Place, results: Results) -> None:
    kept = Sampler(0.0, place, results)
    kept.note("1", [b"a"], [answer_of()])
    kept.note_disagreement(b"b", answer_of(), answer_of(sure=True), 3)
    assert results.wait(1) == {"written": 1}
    (sample,) = place.samples
    assert sample.image == b"b"
    assert json.loads(sample.text)["disagrees"]["sure"] is True
    assert json.loads(sample.text)["image"] == 3


def test_the_ratio_counts(place: Place, results: Results) -> None:
    kept = Sampler(0.5, place, results)
    names = [f"id{number}" for number in range(200)]
    for name in names:
        kept.note(name, [b"a"], [answer_of()])
    chosen = sum(is_chosen(name, 0, 0.5) for name in names)
    assert results.wait(chosen) == {"written": chosen}
    assert 60 < chosen < 140


def test_what_the_queue_has_no_room_for_is_dropped(place: Place, results: Results) -> None:
    place.gate.clear()
    kept = Sampler(1.0, place, results)
    number = sampler.MAX_WAITING + 10
    for each in range(number):
        kept.note(f"id{each}", [b"a"], [answer_of()])  # returns, though nothing is written
    assert 9 <= results.counts["dropped"] <= 10  # the thread may have one in its hands
    place.gate.set()
    assert results.wait(number)["written"] == number - results.counts["dropped"]
    kept.note("later", [b"a"], [answer_of()])
    results.wait(number + 1)
    assert len(place.samples) == results.counts["written"]


def test_waiting_images_have_bytes_in_all(
    place: Place, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MAX_WAITING_BYTES", 100)
    place.gate.clear()
    kept = Sampler(1.0, place, results)
    for each in range(20):
        kept.note(f"id{each}", [b"a" * 30], [answer_of()])
    assert 16 <= results.counts["dropped"] <= 17
    place.gate.set()
    results.wait(20)
    kept.note("later", [b"a" * 90], [answer_of()])  # the room is there again
    assert results.wait(21)["written"] == 21 - results.counts["dropped"]


def test_a_place_that_fails_is_logged_and_no_answers_trouble(
    place: Place, results: Results, caplog: pytest.LogCaptureFixture
) -> None:
    place.is_broken = True
    kept = Sampler(1.0, place, results)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for number in range(20):
            kept.note(f"id{number}", [b"a"], [answer_of()])
        assert results.wait(20) == {"failed": 20}
    (line,) = caplog.messages
    assert "cannot write samples (OSError: [Errno 28] No space left on device)" in line


def test_a_sample_that_is_too_large_is_dropped(tmp_path: Path, results: Results) -> None:
    kept = Sampler(1.0, SampleFolder(tmp_path, 1000), results)
    kept.note("id", [b"a" * 2000], [answer_of()])
    assert results.wait(1) == {"dropped": 1}


def test_the_metric(told: Instruments, tmp_path: Path) -> None:
    sampler.record_sample("written")
    assert told.of(SAMPLES) == {("written",): 1.0}
    assert sampler_of(Settings()) is None
    assert sampler_of(Settings(sample_ratio=0.1, sample_dir=str(tmp_path))) is not None
    assert disagreement_sampler_of(Settings(sample_dir=str(tmp_path))) is None
    versions = Settings(sample_dir=str(tmp_path), shadow="imagenette@000000000000")
    assert disagreement_sampler_of(versions) is not None
