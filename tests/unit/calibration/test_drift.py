"""Records of answers, whoever wrote them; drift is shown where there is some, and only there."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from app.samples.samples import SampleFolder, sample_of
from calibration.answer_files import opened
from calibration.drift import NO_LABEL, Answers, Drift, Wanted, class_shares, compare, read_answers
from models.errors import ModelSetError
from tests.support.answers import answer_of
from tests.support.cases import cases

START = datetime(2026, 11, 26, 8, tzinfo=UTC)
ALL = Wanted()
FAST = {"plan": "fast"}
ERROR = {"file": "bad.jpg", "error": {"code": "not_an_image", "message": "no image"}}


def row(label: str = "x", *, model_set: str = "tiny", agreement: bool = True) -> dict:
    prediction = {"index": 0, "label": label, "probability": 0.75}
    return {
        "file": "a.jpg",
        "model_set": model_set,
        "model_version": "0123456789ab",
        "predictions": [prediction],
        "members": {"a": {"label": label, "probability": 0.75, "predictions": [prediction]}},
        "agreement": agreement,
    }


def written(path, *rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def sampled(folder, *names):
    """Write samples as a service does, one an hour, of the sets ``names``."""
    place = SampleFolder(folder, 2**20)
    for hour, name in enumerate(names):
        answer = answer_of()
        answer.model_set = name
        place.write(sample_of(b"\xff\xd8\xff", answer, 0, START + timedelta(hours=hour)))
    return folder


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_what_classify_offline_wrote(tmp_path, name):
    with opened(tmp_path / name, "0123456789ab", {"plan": "fast"}) as file:
        for each in (row("a") | FAST, ERROR, row("b", agreement=False) | FAST):
            file.add(each)
    answers = read_answers(tmp_path / name, ALL)
    assert (answers.labels, answers.confidence.tolist()) == (("a", "b"), [0.75, 0.75])
    assert answers.agreement.tolist() == [True, False]
    assert (answers.versions, answers.plans) == ({"0123456789ab": 2}, {"fast": 2})
    assert read_answers(tmp_path / name, Wanted(plan="full")).num == 0
    assert (answers.first, answers.last) == (None, None)


def test_what_a_service_sampled(tmp_path):
    answers = read_answers(sampled(tmp_path, "fake", "fake", "fake"), ALL)
    assert (answers.labels, answers.confidence.tolist()) == (("x", "x", "x"), [0.9] * 3)
    assert (answers.first, answers.last) == (START, START + timedelta(hours=2))


def test_samples_of_any_folder_but_not_those_that_versions_disagree_on(tmp_path):
    days = tmp_path / "days"  # so a store has them, and what copies it
    sampled(days / "20261126", "fake")
    sampled(days / "20261127", "fake")
    assert read_answers(days, ALL).num == 2
    tmp_path = tmp_path / "versions"
    tmp_path.mkdir()
    folder = tmp_path / "disagreements"
    folder.mkdir()
    written(tmp_path / "a.json", row())
    written(folder / "b.json", row() | {"disagrees": row()})
    assert read_answers(tmp_path, ALL).num == 1


def test_a_time_divides_samples(tmp_path):
    folder, noon = sampled(tmp_path, *["fake"] * 5), START + timedelta(hours=2)
    assert read_answers(folder, Wanted(until=noon)).num == 2
    assert read_answers(folder, Wanted(since=noon)).num == 3
    record = written(tmp_path / "answers.jsonl", row())
    assert read_answers(record, Wanted(until=noon)).num == 1  # a record without times is of any


def test_a_set_and_a_version(tmp_path):
    folder = sampled(tmp_path, "a", "b", "b")
    with pytest.raises(ModelSetError, match="has answers of a, b: choose one with --model-set"):
        read_answers(folder, ALL)
    assert read_answers(folder, Wanted("b")).num == 2
    assert read_answers(folder, Wanted("b", "0123456789ab")).num == 2
    assert read_answers(folder, Wanted("b", "another")).num == 0


def test_a_plan(tmp_path):
    path = written(tmp_path / "answers.jsonl", row(), row() | {"plan": "full"}, row() | FAST)
    assert read_answers(path, ALL).plans == {"full": 2, "fast": 1}  # a row without a plan is full
    assert read_answers(path, Wanted(plan="full")).num == 2
    assert read_answers(path, Wanted(plan="fast")).num == 1


def test_answers_without_a_label():
    answers = Answers.of([row() | {"predictions": []}, row() | {"predictions": None}])
    assert answers.labels == (NO_LABEL, NO_LABEL)
    assert answers.confidence.tolist() == [0.0, 0.0]


@cases(
    "content, message",
    ('{"file": "a"', "line 2: not JSON"),
    ("[1]", "line 2: not an answer of tandem"),
    ('{"file": "a"}', "line 2: not an answer of tandem: it has no predictions"),
    ('{"predictions": [{"label": "x"}]}', "a row is not an answer of tandem"),
    ('{"predictions": 3, "agreement": true}', "a row is not an answer of tandem"),
    (json.dumps(row() | {"time": "noon"}), "time is 'noon', not like .*; remove the row, or write"),
    (json.dumps(row() | {"time": 5}), "time is 5, not like"),
    (json.dumps(row() | {"predictions": [{"label": "x", "probability": None}]}), "is None, no"),
    (json.dumps(row() | {"predictions": [{"label": "x", "probability": 2}]}), "is 2, not a n"),
    (json.dumps(row() | {"predictions": [{"label": 3, "probability": 1}]}), "is 3, not a s"),
)
def test_what_is_no_answer(tmp_path, content, message):
    path = written(tmp_path / "answers.jsonl", row())
    path.write_text(path.read_text() + content)
    with pytest.raises(ModelSetError, match=message):
        read_answers(path, ALL)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ModelSetError, match="no such file or folder"):
        read_answers(tmp_path / "none.jsonl", ALL)
    with pytest.raises(
        ModelSetError, match=r"has no samples\. If it is a folder of images, run tandem class"
    ):
        read_answers(tmp_path, ALL)
    (tmp_path / "other.parquet").write_bytes(b"no parquet")
    with pytest.raises(ModelSetError, match="not answers of tandem"):
        read_answers(tmp_path / "other.parquet", ALL)


CLASSES = [f"class {number}" for number in range(10)]
EVEN = [0.1] * 10


def drawn(num, seed, shares=EVEN, confidence: tuple[float, float] = (8.0, 2.0), agreement=0.9):
    """Draw answers: classes by ``shares``, confidence of a beta distribution."""
    rng = np.random.default_rng(seed)
    labels = [CLASSES[i] for i in rng.choice(len(shares), num, p=shares)]
    right, wrong = confidence
    sure = rng.beta(right, wrong, num)
    return Answers(tuple(labels), sure, rng.random(num) < agreement, {"a": num})


def drifted(drift: Drift) -> list[str]:
    return [each.name for each in drift.differences if each.is_drift]


def test_answers_of_the_same_kind_rarely_differ():
    """At a level of 5 %, 100 draws without drift show it in 5; 15 are beyond any chance."""
    shown = sum(compare(drawn(400, seed), drawn(300, seed + 1000)).is_drift for seed in range(100))
    assert shown <= 15


@cases(
    "changed, expected",
    ({"shares": [0.4, 0.0, 0.0, *[0.6 / 7] * 7]}, ["classes"]),
    ({"confidence": (4.0, 3.0)}, ["confidence"]),
    ({"agreement": 0.7}, ["agreement"]),
)
def test_each_kind_of_drift_is_shown_alone(changed, expected):
    assert drifted(compare(drawn(1000, 1), drawn(500, 2, **changed))) == expected


def test_a_trifle_among_very_many_images_is_no_drift():
    slightly: dict[str, Any] = {
        "confidence": (8.0, 2.1),
        "agreement": 0.91,
        "shares": [0.11, 0.09, *[0.1] * 8],
    }
    drift = compare(drawn(200_000, 1), drawn(200_000, 2, **slightly))
    assert all(each.adjusted_p < 1e-6 for each in drift.differences)
    assert not drift.is_drift


def test_chance_in_few_images_is_no_drift():
    """50 images of 10 classes differ a lot; 20 pairs of them, and the effect is past its bound."""
    drifts = [compare(drawn(50, seed), drawn(50, seed + 100)) for seed in range(20)]
    assert any(d.differences[0].effect > d.differences[0].bound for d in drifts)
    assert sum(drift.is_drift for drift in drifts) <= 4


def test_the_effect_does_not_hang_on_how_many_images_a_side_has():
    shares = [0.3, *[0.7 / 9] * 9]
    effects = [
        compare(drawn(20_000, 1), drawn(num, 2, shares)).differences[0].effect
        for num in (1_000, 5_000, 20_000)
    ]
    assert max(effects) - min(effects) < 0.05
    assert min(effects) > 0.2


def test_classes_that_exclude_each_other_are_the_largest_effect():
    first = drawn(500, 1, [0.5, 0.5, *[0.0] * 8])
    second = drawn(60, 2, [*[0.0] * 8, 0.5, 0.5])
    assert compare(first, second).differences[0].effect == pytest.approx(1.0, abs=0.02)


def test_rare_classes_are_tested_together():
    """Of 1,000 classes with an image or none each, chi-squared of single ones says nothing."""
    rng = np.random.default_rng(5)
    sides = [
        Answers(
            tuple(f"class {i}" for i in rng.integers(0, 1000, 300)),
            rng.random(300),
            np.ones(300, bool),
            {"a": 300},
        )
        for _ in range(2)
    ]
    assert compare(*sides).differences[0].p_value > 0.01


def of_classes(classes, model_set=None):
    """Answers that differ in their classes alone."""
    num, rng = len(classes), np.random.default_rng(7)
    labels = tuple(f"class {number}" for number in classes)
    return Answers(labels, rng.random(num), np.ones(num, bool), {"a": num}, model_set=model_set)


@pytest.mark.parametrize("num_reference", [300, 5_000, 50_000])
def test_drift_among_a_thousand_classes_is_shown(num_reference):
    rng = np.random.default_rng(3)
    reference = of_classes(rng.integers(0, 1000, num_reference))
    classes = compare(reference, of_classes(rng.integers(900, 1000, 200))).differences[0]
    assert classes.is_drift
    assert classes.effect > 0.5
    assert not compare(reference, of_classes(rng.integers(0, 1000, 200))).differences[0].is_drift


def test_classes_that_exclude_each_other_and_one_class_alone():
    rng = np.random.default_rng(3)
    sides = [of_classes(rng.integers(low, low + 500, 200)) for low in (0, 500)]
    classes = compare(*sides).differences[0]
    assert classes.is_drift
    assert classes.effect == pytest.approx(1.0, abs=0.02)
    drift = compare(drawn(60, 1, [1.0], agreement=1.0), drawn(60, 2, [1.0], agreement=1.0))
    classes, _, agreement = drift.differences
    assert (classes.p_value, classes.effect) == (1.0, 0.0)
    assert (agreement.p_value, agreement.effect) == (1.0, 0.0)
    assert not drift.is_drift


def test_answers_of_two_sets_are_not_compared():
    first, second = (of_classes(np.arange(60), name) for name in ("a", "b"))
    with pytest.raises(ModelSetError, match="of a, and the samples of b: choose with --model-set"):
        compare(first, second)
    assert not compare(first, of_classes(np.arange(60))).is_drift  # a record that does not say


def test_shares_of_classes_the_largest_change_first():
    shares = class_shares(("a", "a", "b", "b"), ("a", "b", "b", "b", "c"))
    assert [(s.label, s.num_reference, s.num_samples) for s in shares] == [
        ("a", 2, 1),
        ("c", 0, 1),
        ("b", 2, 3),
    ]
    assert [round(s.change, 3) for s in shares] == [-0.3, 0.2, 0.1]


def test_figures_of_both_sides():
    _, confidence, agreement = compare(drawn(2000, 1), drawn(2000, 2, agreement=0.5)).differences
    assert confidence.reference == pytest.approx(0.8, abs=0.01)
    assert agreement.reference == pytest.approx(0.9, abs=0.03)
    assert agreement.samples == pytest.approx(0.5, abs=0.04)
    assert agreement.samples is not None
    assert agreement.reference is not None
    assert agreement.statistic == agreement.samples - agreement.reference


@pytest.mark.parametrize(("nums", "side"), [((49, 60), "the reference"), ((60, 0), "samples")])
def test_too_few_images(nums, side):
    with pytest.raises(
        ModelSetError, match=f"{side}: {min(nums)} answers, and the tests need at least 50"
    ):
        compare(*(drawn(num, 1) for num in nums))
