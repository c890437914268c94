"""Samples: which images are chosen, and what a sample of one holds."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest

from app.answers import MemberOpinion, as_json
from app.samples.samples import is_chosen, sample_of
from tests.support.answers import answer_of
from tests.support.cases import cases

WHEN = datetime(2026, 11, 26, 8, 30, 5, 123456, UTC)


IDS = [f"request-{number}" for number in range(4000)]


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.25, 0.9, 1.0])
def test_the_share_that_is_chosen(ratio: float) -> None:
    chosen = sum(is_chosen(name, 0, ratio) for name in IDS)
    deviation = (ratio * (1 - ratio) * len(IDS)) ** 0.5
    assert abs(chosen - ratio * len(IDS)) <= 4 * deviation


def test_images_are_chosen_each_by_itself_and_a_larger_share_has_all_of_a_smaller():
    chosen = [is_chosen("id", place, 0.5) for place in range(64)]
    assert 10 < sum(chosen) < 54
    assert chosen == [is_chosen("id", place, 0.5) for place in range(64)]
    few = {name for name in IDS if is_chosen(name, 0, 0.1)}
    assert few < {name for name in IDS if is_chosen(name, 0, 0.2)}


def test_the_answer_of_a_version_that_disagrees_is_beside_it() -> None:
    other = dataclasses.replace(answer_of(), model_version="fedcba987654")
    plain, both = (
        json.loads(sample_of(b"\xff\xd8\xff...", answer_of(), 0, WHEN, each).text)
        for each in (None, other)
    )
    disagrees = both.pop("disagrees")
    assert both == plain
    assert disagrees["model_version"] == "fedcba987654"
    assert disagrees["predictions"] == plain["predictions"]
    assert "timings_ms" not in disagrees


def test_an_answer_is_kept_as_it_was() -> None:
    answer = answer_of(agreement=False, sure=True)
    sample = sample_of(b"\xff\xd8\xff...", answer, 2, WHEN)
    (image, picture), (name, text) = sample.files
    assert (picture, sample.num_bytes) == (b"\xff\xd8\xff...", 6 + len(text))
    assert image.removesuffix(".jpg") == name.removesuffix(".json") == sample.stem
    assert json.loads(text) == {
        "file": image,
        "time": "2026-11-26T08:30:05.123+00:00",
        "image": 2,
        "model_set": "fake",
        "model_version": "0123456789ab",
        "predictions": [{"index": 0, "label": "x", "probability": 0.9}],
        "members": {name: dataclasses.asdict(own) for name, own in answer.members.items()},
        "agreement": False,
        "degraded": False,
        "sure": True,
        "plan": "full",
        "request_id": "1",
    }


def test_a_sample_is_as_the_client_got_it_without_all_probabilities():
    answer = dataclasses.replace(
        answer_of(), predictions=[], members={"m": MemberOpinion(predictions=[])}, threshold=0.5
    )
    row = json.loads(sample_of(b"", answer, 0, WHEN).text)
    assert row["members"] == {"m": {"predictions": []}}  # as the client got it
    answer = dataclasses.replace(answer_of(), probabilities=np.zeros(3, np.float32))
    assert sample_of(b"", answer, 0, WHEN).text == sample_of(b"", answer_of(), 0, WHEN).text
    assert as_json(answer) == as_json(answer_of())


def test_names_are_in_the_order_of_arrival_wherever_the_clock_is() -> None:
    east = timezone(timedelta(hours=9))
    first, second = (
        sample_of(b"", answer_of(), 0, when)
        for when in (WHEN.astimezone(east), WHEN + timedelta(microseconds=1))
    )
    assert first.stem < second.stem
    assert first.stem.startswith("20261126T083005123456-")


@cases(
    "start, suffix",
    (b"\x89PNG", "png"),
    (b"RIFF....WEBP", "webp"),
    (b"\0\0\0\x18ftypheic", "heic"),
    (b"?", "bin"),
)
def test_the_suffix_is_the_formats(start: bytes, suffix: str) -> None:
    assert sample_of(start, answer_of(), 0, WHEN).suffix == suffix


def test_a_request_id_is_no_part_of_a_path() -> None:
    answer = dataclasses.replace(answer_of(), request_id="../../etc/passwd\0")
    assert "/" not in sample_of(b"", answer, 0, WHEN).stem
