"""``tandem evaluate`` on networks whose answers are known without running them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.fitting import part_of
from models.errors import ModelSetError
from models.ledger import judge
from models.manifest import ENSEMBLE, read_manifest
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.plans import planned
from tests.support.plans import sure_from as bound_at
from tests.support.tiny_networks import LABELS, picture, write_pictures, write_tiny_set

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
    assert (tally.num_right, tally.num_images) == (21, 22)
    assert tally.confusion[0, 2] == 1
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
    assert content["num_images"] == 21
    assert len(content["unreadable"]) == 2


def test_a_file_without_permission_is_unreadable(tmp_path, pictures, monkeypatch):
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    closed = min((mixed / LABELS[1]).iterdir())
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == closed:  # root may read everything, whatever its mode says
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    folder = write_tiny_set(tmp_path / "tiny")
    done = evaluated(folder, "--images", mixed, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    (line,) = json.loads((tmp_path / "r.json").read_text())["unreadable"]
    assert line.startswith(str(closed))


def test_a_folder_of_nothing_but_rubbish_is_an_error(tmp_path: Path) -> None:
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
    num_wrong = sum(path.name == "wrong.png" for path in judged)
    right = round(1 - num_wrong / len(judged), 4)
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
