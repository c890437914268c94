"""Records of answers, whoever wrote them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.samples.places import SampleFolder
from app.samples.sample import sample_of
from calibration.drift.answers import NO_LABEL, Answers, Wanted, read_answers
from calibration.offline.answer_files import opened
from models.errors import ModelSetError
from tests.support.answers import answer_of

START = datetime(2026, 11, 26, 8, tzinfo=UTC)
ALL = Wanted()


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


ERROR = {"file": "bad.jpg", "error": {"code": "not_an_image", "message": "no image"}}


def written(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def sampled(folder: Path, *names: str) -> Path:
    """Write samples as a service does, one an hour, of the sets ``names``."""
    place = SampleFolder(folder, 2**20)
    for hour, name in enumerate(names):
        answer = answer_of()
        answer.model_set = name
        place.write(sample_of(b"\xff\xd8\xff", answer, 0, START + timedelta(hours=hour)))
    return folder


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_what_classify_offline_wrote(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / name, "0123456789ab") as file:
        for each in (row("a"), ERROR, row("b", agreement=False)):
            file.add(each)
    answers = read_answers(tmp_path / name, ALL)
    assert answers.labels == ("a", "b")
    assert answers.confidence.tolist() == [0.75, 0.75]
    assert answers.agreement.tolist() == [True, False]
    assert answers.versions == {"0123456789ab": 2}
    assert (answers.first, answers.last) == (None, None)


def test_what_a_service_sampled(tmp_path: Path) -> None:
    answers = read_answers(sampled(tmp_path, "fake", "fake", "fake"), ALL)
    assert answers.labels == ("x", "x", "x")
    assert answers.confidence.tolist() == [0.9] * 3
    assert (answers.first, answers.last) == (START, START + timedelta(hours=2))


def test_a_folder_below_for_each_day(tmp_path: Path) -> None:
    """So a store has them, and what copies it."""
    sampled(tmp_path / "20261126", "fake")
    sampled(tmp_path / "20261127", "fake")
    assert read_answers(tmp_path, ALL).num == 2


def test_photos_that_versions_disagree_on_are_no_samples_of_the_traffic(tmp_path: Path) -> None:
    folder = tmp_path / "disagreements"
    folder.mkdir()
    written(tmp_path / "a.json", row())
    written(folder / "b.json", row() | {"disagrees": row()})
    assert read_answers(tmp_path, ALL).num == 1


def test_a_time_divides_samples(tmp_path: Path) -> None:
    folder, noon = sampled(tmp_path, *["fake"] * 5), START + timedelta(hours=2)
    assert read_answers(folder, Wanted(until=noon)).num == 2
    assert read_answers(folder, Wanted(since=noon)).num == 3
    record = written(tmp_path / "answers.jsonl", row())
    assert read_answers(record, Wanted(until=noon)).num == 1  # a record without times is of any


def test_a_set_and_a_version(tmp_path: Path) -> None:
    folder = sampled(tmp_path, "a", "b", "b")
    with pytest.raises(ModelSetError, match="has answers of a, b: choose one with --model-set"):
        read_answers(folder, ALL)
    assert read_answers(folder, Wanted("b")).num == 2
    assert read_answers(folder, Wanted("b", "0123456789ab")).num == 2
    assert read_answers(folder, Wanted("b", "another")).num == 0


def test_answers_without_a_label() -> None:
    answers = Answers.of([row() | {"predictions": []}, row() | {"predictions": None}])
    assert answers.labels == (NO_LABEL, NO_LABEL)
    assert answers.confidence.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"file": "a"', "line 2: not JSON"),
        ("[1]", "line 2: not an answer of tandem"),
        ('{"file": "a"}', "line 2: not an answer of tandem: it has no predictions"),
        ('{"predictions": [{"label": "x"}]}', "a row is not an answer of tandem"),
        ('{"predictions": 3, "agreement": true}', "a row is not an answer of tandem"),
        (
            json.dumps(row() | {"time": "noon"}),
            "time is 'noon', not like .*; remove the row, or write",
        ),
        (json.dumps(row() | {"time": 5}), "time is 5, not like"),
        (json.dumps(row() | {"predictions": [{"label": "x", "probability": None}]}), "is None, no"),
        (json.dumps(row() | {"predictions": [{"label": "x", "probability": 2}]}), "is 2, not a n"),
        (json.dumps(row() | {"predictions": [{"label": 3, "probability": 1}]}), "is 3, not a s"),
    ],
)
def test_what_is_no_answer(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path / "answers.jsonl", row())
    path.write_text(path.read_text() + content)
    with pytest.raises(ModelSetError, match=message):
        read_answers(path, ALL)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelSetError, match="no such file or folder"):
        read_answers(tmp_path / "none.jsonl", ALL)
    with pytest.raises(
        ModelSetError, match=r"has no samples\. If it is a folder of images, run tandem class"
    ):
        read_answers(tmp_path, ALL)
    (tmp_path / "other.parquet").write_bytes(b"no parquet")
    with pytest.raises(ModelSetError, match="not answers of tandem"):
        read_answers(tmp_path / "other.parquet", ALL)
