"""What ``tandem evaluate`` keeps of what it measured, and when it keeps nothing."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration.commands import evaluate as evaluate_run
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.record import keep, record_of
from calibration.sets.transaction import change, write_manifest
from models.accuracy import AccuracyRecord
from models.errors import ModelSetError
from models.files import ResultFileError
from models.manifest import ENSEMBLE, read_manifest
from models.model_set import ModelSet, load_model_set
from models.record import FileRecord, sha256_of
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.full_disk import full_disk
from tests.support.tiny_networks import with_accuracy, write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set whose members have both precisions."""
    return two_precisions(tmp_path / "tiny")


def test_calibration_images_are_refused(tmp_path: Path, pictures: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    used = [sha256_of(path) for path in sorted(pictures.glob("*/*"))[:2]]
    (folder / "used.txt").write_text("\n".join(used))
    manifest = read_manifest(folder)
    record = FileRecord.of(folder, "used.txt")
    write_manifest(folder, manifest.model_copy(update={"calibration": record}))
    done = evaluated(folder, "--images", pictures)
    assert isinstance(done.exception, ModelSetError)
    assert "2 of 21 images were used to calibrate tiny" in str(done.exception)
    assert read_manifest(folder).accuracy == ()


def test_the_same_images_replace_their_record(folder, tmp_path, pictures):
    moved = shutil.copytree(pictures, tmp_path / "moved")
    for images in (pictures, moved):
        assert evaluated(folder, "--images", images).exit_code == 0
    assert [r.dataset for r in read_manifest(folder).accuracy] == [f"{tmp_path.name}/moved"]


@pytest.mark.parametrize("option", ["--no-record", "--max-images=5"])
def test_a_look_is_not_recorded(tmp_path: Path, pictures: Path, option: str) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    assert evaluated(folder, "--images", pictures, option).exit_code == 0
    assert read_manifest(folder).accuracy == ()


def test_of_a_set_in_a_store_nothing_is_recorded(tmp_path, pictures, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = write_tiny_set(tmp_path / "cache" / "tandem" / "sets" / "of-the-url" / "digest")
    done = evaluated(copy, "--images", pictures)
    assert done.exit_code == 0, done.output
    assert "the set comes from a store, so the result is not recorded" in done.stderr
    assert read_manifest(copy).accuracy == ()


def test_a_member_without_float_has_no_drop(folder, pictures):
    manifest = read_manifest(folder)
    first = manifest.members[0]
    only_int8 = first.model_copy(update={"networks": {"INT8": first.networks["INT8"]}})
    members = (only_int8, manifest.members[1])
    write_manifest(folder, manifest.model_copy(update={"members": members}))
    assert evaluated(folder, "--images", pictures).exit_code == 0
    (record,) = read_manifest(folder).accuracy
    assert set(record.drops) == {"unsure"}
    assert set(record.scores["FP16"]) == {"unsure"}  # no ensemble of some of the members


def test_networks_that_changed_meanwhile_are_not_recorded(folder, pictures):
    """Another command may quantise while this one measures: its record is of what was there."""
    model_set = load_model_set(str(folder))
    found = evaluate_set(model_set, read_dataset(pictures, model_set), ("FP16", "INT8"))
    record = record_of(model_set, found)
    two_precisions(folder, int8_gain=-8.0)
    with pytest.raises(ModelSetError, match="changed while they were measured"):
        keep(folder, record)
    assert read_manifest(folder).accuracy == ()
    assert sorted(p.suffix for p in folder.iterdir() if p.name.startswith(".")) == []


def test_weights_that_changed_meanwhile_are_not_recorded(folder, pictures):
    model_set = load_model_set(str(folder))
    found = evaluate_set(model_set, read_dataset(pictures, model_set), ("FP16", "INT8"))
    first, *others = model_set.manifest.members
    edited = (first.model_copy(update={"weight": 9.0}), *others)
    write_manifest(folder, model_set.manifest.model_copy(update={"members": edited}))
    with pytest.raises(ModelSetError, match="weights or image rule, were changed"):
        keep(folder, record_of(model_set, found))
    assert read_manifest(folder).accuracy == ()


def test_a_set_that_other_images_refuse_is_said_to_be_refused(folder, pictures):
    bad = with_accuracy(read_manifest(folder), {ENSEMBLE: 1.0}, {ENSEMBLE: 0.5}, dataset="others")
    write_manifest(folder, bad)
    done = evaluated(folder, "--images", pictures)
    assert done.exit_code == 1
    assert "not by these images, but by others" in done.stderr
    assert "costs ensemble 50.00 points of top-1 on others" in done.stderr


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ModelSet]:
    """Note each measurement."""
    sets: list[ModelSet] = []
    real = evaluate_run._measured

    def noted(
        model_set: ModelSet, options: evaluate_run.EvaluateOptions
    ) -> evaluate_run.EvaluatedSet:
        sets.append(model_set)
        return real(model_set, options)

    monkeypatch.setattr(evaluate_run, "_measured", noted)
    return sets


def test_a_set_that_another_command_changes_is_not_measured_in_vain(folder, pictures, measured):
    with change(folder):  # somebody else is at work on it
        done = evaluated(folder, "--images", pictures)
        assert evaluated(folder, "--images", pictures, "--no-record").exit_code == 0
    assert isinstance(done.exception, ModelSetError)
    assert "another command is changing" in str(done.exception)
    assert len(measured) == 1


def test_a_full_disk_is_seen_before_measuring(folder, pictures, measured):
    with full_disk(40_000):
        done = evaluated(folder, "--images", pictures)
    assert isinstance(done.exception, ModelSetError)
    assert "MB are free there" in str(done.exception)
    assert measured == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("has_temp", [True, False], ids=["file", "text"])
def test_a_record_that_the_set_cannot_take_any_more_is_kept_aside(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, has_temp: bool
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    aside = tmp_path / "aside"
    if has_temp:
        aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    real = keep

    def taken_meanwhile(folder: Path, record: AccuracyRecord) -> None:
        with change(folder):
            real(folder, record)

    monkeypatch.setattr(evaluate_run, "keep", taken_meanwhile)
    done = evaluated(folder, "--images", pictures)
    assert "1.0000" in done.stdout
    message = str(done.exception)
    assert "another command is changing" in message
    text = next(aside.iterdir()).read_text("utf-8") if has_temp else message.split("yaml:\n")[1]
    content = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    content["accuracy"] = yaml.safe_load(text)
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content), "utf-8")
    (record,) = read_manifest(folder).accuracy
    assert record.scores["INT8"][ENSEMBLE].figure == ("top-1", 1.0)


def test_a_file_that_cannot_be_written_is_named_before_measuring(
    tmp_path: Path, pictures: Path, measured: list[ModelSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    touch, readonly = Path.touch, tmp_path / "results"
    readonly.mkdir()  # root may write anywhere, whatever its mode says

    def make(path: Path, *arguments: Any) -> None:
        if path.parent == readonly:
            raise PermissionError(13, "Permission denied")
        touch(path, *arguments)

    monkeypatch.setattr(Path, "touch", make)
    done = evaluated(folder, "--images", pictures, "--json", readonly / "result.json")
    assert "Permission denied; name a file in a folder that can" in str(done.exception)
    assert measured == []


def test_a_disk_that_fills_while_measuring_is_no_traceback(folder, tmp_path, pictures):
    with full_disk(100):
        done = evaluated(
            folder, "--images", pictures, "--no-record", "--json", tmp_path / "result.json"
        )
    assert isinstance(done.exception, ResultFileError)
    assert "result.json: File too large; make room" in str(done.exception)
    assert "1.0000" in done.stdout
