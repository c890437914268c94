"""``tandem evaluate`` on networks whose answers are known: what it finds, records and refuses."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openvino as ov
import pytest
import yaml
from openvino import opset13 as ops

from calibration.commands import evaluate as evaluate_run
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.fitting import part_of
from calibration.evaluation.inference import Networks, batches, through_threads
from calibration.evaluation.report import keep, record_of
from calibration.sets.add_set import NewSet, add_set
from calibration.sets.transaction import change, write_manifest
from models.errors import ModelSetError
from models.files import ResultFileError
from models.image import read_image
from models.ledger import judge
from models.manifest import ENSEMBLE, read_manifest
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import FileRecord, ImageRecord, sha256_of
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.full_disk import full_disk
from tests.support.plans import planned
from tests.support.plans import sure_from as bound_at
from tests.support.tiny_networks import (
    LABELS,
    picture,
    with_accuracy,
    write_pictures,
    write_tiny_set,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_right_networks_are_right(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures)
    assert done.exit_code == 0, done.output
    (record,) = read_manifest(folder).accuracy
    assert record.num_images == 21
    for precision in ("FP16", "INT8"):
        scores = record.scores[precision]
        assert {name: score.top1 for name, score in scores.items()} == {
            "sure": 1.0,
            "unsure": 1.0,
            ENSEMBLE: 1.0,
        }
        assert scores["sure"].top1_interval[0] == pytest.approx(0.8454, abs=1e-4)  # Wilson, 21/21
    assert {name: drop.top1 for name, drop in record.drops.items()} == {
        "sure": 0.0,
        "unsure": 0.0,
        ENSEMBLE: 0.0,
    }
    assert record.cpu_ms_per_image["sure"]["FP16"] > 0
    assert record.size_mb["sure"]["FP16"] > 0
    assert record.int8_kernels == ""  # these have no convolution that is INT8... nor any
    verdict = judge(read_manifest(folder), argument=str(folder))
    assert verdict.status == "unknown"  # 21 images are few
    assert verdict.message in " ".join(done.stderr.split())


def test_folders_are_class_numbers_as_in_a_list(tmp_path: Path) -> None:
    """A network of 12 colours, and 12 folders: as text 10 comes before 2."""
    colors = np.array([(b, g, r) for b in (0, 1) for g in (0, 1) for r in (0, 0.5, 1)], np.float32)
    pixels = ops.parameter([-1, 16, 16, 3], ov.Type.u8)
    means = ops.reduce_mean(ops.convert(pixels, "f32"), np.array([1, 2]), keep_dims=False)
    nearest = ops.matmul(ops.divide(means, np.float32(255)), colors * 40, False, True)
    logits = ops.subtract(nearest, np.sum(colors**2, 1, keepdims=True).T * np.float32(20))
    nets = tmp_path / "nets"
    nets.mkdir()
    ov.save_model(ov.Model([ops.softmax(logits, 1)], [pixels], "colours"), nets / "a.xml")
    (nets / "labels.txt").write_text("".join(f"colour {c}\n" for c in "abcdefghijkl"), "utf-8")
    images, rows = tmp_path / "images", ["file,label"]
    for number, color in enumerate(colors):
        (images / str(number)).mkdir(parents=True)
        for side in (16, 24):
            encoded = cv2.imencode(".png", np.full((side, side, 3), color * 255, np.uint8))[1]
            (images / f"{number}/{side}.png").write_bytes(encoded.tobytes())
            rows.append(f"{number}/{side}.png,{number}")
    (images / "list.csv").write_text("\n".join(rows), "utf-8")
    made = add_set(NewSet("twelve", [("a", nets / "a.xml")], nets / "labels.txt"), tmp_path)
    for source in (images, images / "list.csv"):
        done = evaluated(made.folder, "--images", source)
        assert done.exit_code == 0, done.output
        record = read_manifest(made.folder).accuracy[-1]
        assert (record.num_images, record.scores["FP16"][ENSEMBLE].top1) == (24, 1.0)


def test_enough_images_verify_and_no_other_image_undoes_that(tmp_path: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=90, side=16)
    assert evaluated(folder, "--images", many).exit_code == 0
    assert judge(read_manifest(folder)).status == "verified"
    few = write_pictures(tmp_path / "few", num_per_color=1, side=20)
    assert evaluated(folder, "--images", few).exit_code == 0
    assert judge(read_manifest(folder)).status == "verified"


def test_wrong_int8_is_an_exit_code_a_record_and_a_refusal(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny", int8_gain=-8.0)
    done = evaluated(folder, "--images", pictures)
    assert done.exit_code == 1
    assert "over +0.50" in done.stdout
    manifest = read_manifest(folder)
    assert manifest.accuracy[0].drops[ENSEMBLE].top1 == 1.0
    assert judge(manifest).status == "dropped"


def test_a_mislabelled_picture_is_one_wrong_answer(tmp_path: Path, pictures: Path) -> None:
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    (mixed / LABELS[0] / "wrong.png").write_bytes(picture("red"))
    model_set = load_model_set(str(write_tiny_set(tmp_path / "tiny")))
    found = evaluate_set(model_set, read_dataset(mixed, model_set), ("INT8",))
    tally = found.tallies["INT8"][ENSEMBLE]
    assert (tally.num_right, tally.num_images, tally.confusion[0, 2]) == (21, 22, 1)
    assert found.num_agreed["INT8"] == 22  # both members take it for red
    assert found.over_members["INT8"]["sure"].difference == 0


def test_unreadable_images_are_counted_and_named(tmp_path: Path, pictures: Path) -> None:
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    for name in ("bad.jpg", "worse.png"):
        (mixed / LABELS[1] / name).write_bytes(b"no image")
    folder = write_tiny_set(tmp_path / "tiny")
    done = evaluated(folder, "--images", mixed, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    assert "2 images cannot be read" in done.stdout
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["num_images"], len(content["unreadable"])) == (21, 2)


def test_a_file_without_permission_is_unreadable(tmp_path, pictures, monkeypatch):
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    closed = min((mixed / LABELS[1]).iterdir())
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path == closed:  # root may read everything, whatever its mode says
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    folder = write_tiny_set(tmp_path / "tiny")
    done = evaluated(folder, "--images", mixed, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    (line,) = json.loads((tmp_path / "r.json").read_text())["unreadable"]
    assert line.startswith(str(closed))


def test_a_folder_of_nothing_but_rubbish_is_an_error(tmp_path):
    for label in LABELS:
        (tmp_path / "bad" / label).mkdir(parents=True)
        (tmp_path / "bad" / label / "x.jpg").write_bytes(b"no image")
    done = evaluated(write_tiny_set(tmp_path / "tiny"), "--images", tmp_path / "bad")
    assert isinstance(done.exception, ModelSetError)
    assert "none of the 3 images" in str(done.exception)


def test_json_on_stdout_is_json_alone(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    content = json.loads(evaluated(folder, "--images", pictures, "--json", "-").stdout)
    assert content["scores"]["INT8"][ENSEMBLE]["top1"] == 1.0
    assert content["agreement"] == {"FP16": 1.0, "INT8": 1.0}
    assert content["ensemble_over_members"]["INT8"]["sure"]["difference"] == 0


@pytest.mark.parametrize(("sure_from", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_sure_answers_and_how_many_are_right_are_in_the_tables(
    tmp_path: Path, pictures: Path, sure_from: float, share: float
) -> None:
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    (mixed / LABELS[0] / "wrong.png").write_bytes(picture("red"))
    folder = write_tiny_set(tmp_path / "tiny", sure=bound_at(sure_from))
    planned(folder, (("sure",), 0.7), (("unsure",), None), bounds=(sure_from, sure_from))
    done = evaluated(folder, "--images", mixed, "--json", tmp_path / "r.json")
    modes = json.loads((tmp_path / "r.json").read_text())["modes"]["INT8"]
    judged = [p for p in mixed.glob("*/*") if part_of(p) == "judge"]  # that chose nothing
    assert list(modes) == ["full", "fast, answered by sure", "fast, answered by sure + unsure"]
    full, first, last = modes.values()
    assert full["num_images"] == first["num_images"] + last["num_images"] == len(judged)
    assert (full["sure"]["from"], full["sure"]["share"]) == (sure_from, share)
    right = round(1 - sum(path.name == "wrong.png" for path in judged) / len(judged), 4)
    assert full["sure"]["right"] == (right if share else None)
    assert f"answers of INT8, on {len(judged)} images that fitted and chose nothing" in done.stdout
    assert "fast, answered by" in done.stdout


def test_a_result_with_nowhere_to_go_is_said_at_once(tmp_path: Path, pictures: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    for option in ("--json", "--html"):
        done = evaluated(folder, "--images", pictures, option, tmp_path / "no" / "such" / "file")
        assert "cannot write" in str(done.exception)


def test_a_network_that_answers_nan_is_named(tmp_path: Path, pictures: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny", gains={"sure": 8.0, "broken": float("nan")})
    done = evaluated(folder, "--images", pictures)
    assert isinstance(done.exception, ModelSetError), done.output
    assert "broken INT8 answers NaN" in str(done.exception)


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
    assert "2 of 21 images were used to make tiny" in str(done.exception)
    assert read_manifest(folder).accuracy == ()


def test_the_same_images_replace_their_record(folder, tmp_path, pictures):
    for images in (pictures, shutil.copytree(pictures, tmp_path / "moved")):
        assert evaluated(folder, "--images", images).exit_code == 0
    assert [r.dataset for r in read_manifest(folder).accuracy] == [f"{tmp_path.name}/moved"]


def test_a_record_notes_whether_profiles_were_converted(folder, tmp_path, pictures, monkeypatch):
    """Both records of the same images stay: the figures may differ."""
    for setting in ("ignore", "convert"):
        monkeypatch.setenv("TANDEM_ICC_PROFILES", setting)
        assert evaluated(folder, "--images", pictures).exit_code == 0
    records = read_manifest(folder).accuracy
    assert [record.icc_profiles for record in records[-2:]] == ["ignore", "convert"]


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

    def noted(model_set, options):
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

    def taken_meanwhile(folder, record):
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
    open_file, readonly = os.open, tmp_path / "results"
    readonly.mkdir()  # root may write anywhere, whatever its mode says

    def refuse(path, *arguments, **more):
        if Path(path).parent == readonly:
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
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


def test_order_and_work_are_kept_by_the_threads() -> None:
    assert list(through_threads(lambda n: n * n, range(50), 3)) == [n * n for n in range(50)]
    assert [list(b) for b in batches(list(range(5)), 2)] == [[0, 1], [2, 3], [4]]


def test_only_a_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for n in range(100):
            taken.append(n)
            yield n

    answers: Any = through_threads(lambda n: n, items(), 2)  # type: ignore[arg-type]
    assert next(answers) == 0
    assert len(taken) <= 6
    answers.close()
    assert len(taken) <= 6


def test_an_error_in_one_batch_ends_the_run() -> None:
    def fail(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    with pytest.raises(ValueError, match="three"):
        list(through_threads(fail, range(1000), 2))


def test_batches_give_what_single_images_give(tiny_set, pictures):
    model_set = load_model_set(str(tiny_set))
    images = read_dataset(pictures, model_set).images
    networks = Networks(model_set, ("INT8",))
    together = networks.answer(images[:8])
    for index, image in enumerate(images[:8]):
        for name, rows in networks.answer([image]).probabilities["INT8"].items():
            np.testing.assert_allclose(
                rows[0], together.probabilities["INT8"][name][index], atol=1e-5
            )


def test_members_get_the_inputs_that_are_theirs(tmp_path, pictures):
    small = ImageRecord(input_size=8, resize_shorter=9)
    folder = write_tiny_set(
        tmp_path / "two", gains={"usual": 8.0, "small": 2.0}, images={"small": small}
    )
    model_set = load_model_set(str(folder))
    images = read_dataset(pictures, model_set).images[:3]
    found = Networks(model_set, ("INT8",)).answer(images).probabilities["INT8"]
    options = RuntimeOptions(batch_sizes=(3,))
    for name in ("usual", "small"):
        rule = model_set.manifest.image_of(name).rule
        pixels = np.stack([read_image(image.path.read_bytes(), rule) for image in images])
        alone = CompiledNetwork(model_set.network_path(name), options).predict(pixels)
        np.testing.assert_allclose(found[name], alone, atol=1e-5)
