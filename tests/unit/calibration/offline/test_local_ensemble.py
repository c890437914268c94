"""The ensemble in this process: one image, many, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from calibration.offline.local_ensemble import Answer, LocalEnsemble, load
from calibration.sets.durable import write_manifest
from models.errors import ImageError, ModelSetError, NotAnImageError
from models.golden import GoldenMismatchError
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.scored_sets import scored_picture, write_scored_set
from tests.support.tiny_networks import (
    take_golden,
    with_accuracy,
    write_opposite_sets,
    write_pictures,
    write_tiny_set,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures of three colours, more than a batch."""
    return sorted(write_pictures(tmp_path_factory.mktemp("pictures"), 7).rglob("*.png"))


@pytest.fixture(scope="module")
def ensemble(tiny_set: Path) -> LocalEnsemble:
    return load(str(tiny_set))


def test_a_path_and_its_bytes_have_the_same_answer(
    ensemble: LocalEnsemble, files: list[Path], tiny_set: Path
) -> None:
    answer = ensemble.classify(files[0], top_k=3)
    assert answer == ensemble.classify(str(files[0]), 3)
    assert answer == ensemble.classify(files[0].read_bytes(), 3)
    assert answer.label == answer.predictions[0].label == files[0].parent.name
    assert len(answer.predictions) == len(answer.members["sure"]) == 3
    assert answer.members.keys() == {"sure", "unsure"}
    assert answer.agreement
    assert answer.model_version == load_model_set(str(tiny_set)).fingerprint()


def test_files_in_memory_are_answered_as_those_on_disk(
    ensemble: LocalEnsemble, files: list[Path]
) -> None:
    mixed = [file.read_bytes() if place % 2 else file for place, file in enumerate(files)]
    answers = list(ensemble.classify_many([*mixed, b"no image"]))
    assert isinstance(answers.pop(), NotAnImageError)
    assert answers == list(ensemble.classify_many(files))


def test_compiled_networks_are_kept_for_the_next_time(
    tiny_set: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load(str(tiny_set)).classify(files[0])
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.blob")}
    assert kept
    assert load(str(tiny_set)).classify(files[0]) == first
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.blob")} == kept


def test_a_start_does_not_wait_for_statistics() -> None:
    """Their import takes as long as reading both networks from the cache."""
    code = "import calibration.offline.run, sys; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_many_files_are_answered_in_order_as_each_alone(
    ensemble: LocalEnsemble, files: list[Path], tmp_path: Path
) -> None:
    (bad := tmp_path / "bad.png").write_text("no image")
    mixed = [*files[:5], bad, *files[5:], tmp_path / "gone.png"]
    answers = list(ensemble.classify_many(mixed))
    assert isinstance(answers.pop(5), NotAnImageError)
    assert isinstance(answers.pop(), FileNotFoundError)
    for file, answer in zip(files, answers, strict=True):
        alone = ensemble.classify(file)
        assert isinstance(answer, Answer)
        assert answer.label == alone.label == file.parent.name
        probability = alone.predictions[0].probability
        assert answer.predictions[0].probability == pytest.approx(probability, abs=1e-6)


def test_what_is_no_image_raises(ensemble: LocalEnsemble) -> None:
    with pytest.raises(ImageError, match="image"):
        ensemble.classify(b"no image")


def test_a_multi_label_set_lists_what_is_above_the_threshold(tmp_path: Path) -> None:
    scored = load(str(write_scored_set(tmp_path / "scored")))
    low, high = (scored.classify(scored_picture("black"), 3, at) for at in (0.001, 0.999))
    assert (low.threshold, len(low.predictions)) == (0.001, 3)
    assert (high.label, high.predictions) == (None, [])
    assert high.fields()["members"] == {name: {"predictions": []} for name in high.members}


def test_a_set_whose_int8_lost_too_much_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.9, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"sure": 0.1}))
    with pytest.raises(ModelSetError, match=r"costs sure 10\.00 points.*Only tandem serve has"):
        load(str(folder))


def test_a_network_that_answers_otherwise_here_is_refused(tmp_path: Path) -> None:
    folder, other = write_opposite_sets(tmp_path)
    take_golden(folder, other)
    with pytest.raises(GoldenMismatchError, match="does not answer as where the set was made"):
        load(str(folder))
