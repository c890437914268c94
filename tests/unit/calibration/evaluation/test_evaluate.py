"""``tandem evaluate`` on networks whose answers are known without running them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from calibration.datasets.labelled import read_dataset
from calibration.evaluation.accuracy_record import keep, record_of
from calibration.evaluation.evaluate import evaluate
from calibration.evaluation.inference import Networks, batches, through_threads
from calibration.sets.transaction import change
from models.accuracy import ENSEMBLE
from models.errors import ModelSetError
from models.ledger import judge
from models.manifest import Network, read_manifest, write_manifest
from models.model_set import load_model_set
from models.record import FileRecord, sha256_of
from tests.support.command_line import tandem
from tests.support.tiny_networks import (
    LABELS,
    picture,
    save_model,
    tiny_model,
    with_accuracy,
    write_pictures,
    write_tiny_set,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 pictures, every one what its folder says."""
    return write_pictures(tmp_path_factory.mktemp("data") / "eval", num_per_color=7)


def two_precisions(folder: Path, int8_gain: float = 8.0) -> Path:
    """A set whose INT8 networks are made, not quantised; a negative gain answers all wrong."""
    write_tiny_set(folder, precision="FP16", num_convolutions=1)
    manifest = read_manifest(folder)
    members = []
    for member in manifest.members:
        network = save_model(tiny_model(gain=int8_gain), folder, f"{member.name}-int8")
        networks: dict[str, Network] = {**member.networks, "INT8": network}
        members.append(member.model_copy(update={"networks": networks}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members)}))
    return folder


def evaluated(*arguments: object) -> Result:
    return tandem("evaluate", *arguments)


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
    found = evaluate(model_set, read_dataset(mixed, model_set), ("INT8",))
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


def test_a_folder_of_nothing_but_rubbish_is_an_error(tmp_path: Path) -> None:
    for label in LABELS:
        (tmp_path / "bad" / label).mkdir(parents=True)
        (tmp_path / "bad" / label / "x.jpg").write_bytes(b"no image")
    done = evaluated(write_tiny_set(tmp_path / "tiny"), "--images", tmp_path / "bad")
    assert isinstance(done.exception, ModelSetError)
    assert "none of the 3 images" in str(done.exception)


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


def test_the_same_images_replace_their_record(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    moved = shutil.copytree(pictures, tmp_path / "moved")
    for images in (pictures, moved):
        assert evaluated(folder, "--images", images).exit_code == 0
    assert [r.dataset for r in read_manifest(folder).accuracy] == [f"{tmp_path.name}/moved"]


@pytest.mark.parametrize("option", ["--no-record", "--max-images=5"])
def test_a_look_is_not_recorded(tmp_path: Path, pictures: Path, option: str) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    assert evaluated(folder, "--images", pictures, option).exit_code == 0
    assert read_manifest(folder).accuracy == ()


def test_json_on_stdout_is_json_alone(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    content = json.loads(evaluated(folder, "--images", pictures, "--json", "-").stdout)
    assert content["scores"]["INT8"][ENSEMBLE]["top1"] == 1.0
    assert content["agreement"] == {"FP16": 1.0, "INT8": 1.0}
    assert content["ensemble_over_members"]["INT8"]["sure"]["difference"] == 0
    never, *_, always = content["cascade"]["INT8"]["points"]
    assert never["top1"] == always["top1"] == 1.0
    assert always["cpu_ms_per_image"] == content["cpu_ms_per_image"]["sure"]["INT8"]


def test_a_result_with_nowhere_to_go_is_said_at_once(tmp_path: Path, pictures: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    for option in ("--json", "--html"):
        done = evaluated(folder, "--images", pictures, option, tmp_path / "no" / "such" / "file")
        assert "cannot write" in str(done.exception)


def test_the_page_is_written(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    assert evaluated(folder, "--images", pictures, "--html", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4
    assert "mostly green" in page


def test_fitted_weights_are_reported(tmp_path: Path, pictures: Path) -> None:
    """One member is always wrong: the likelihood wants it gone, and the other half agrees."""
    folder = write_tiny_set(tmp_path / "tiny", gains={"right": 4.0, "wrong": -4.0})
    done = evaluated(folder, "--images", pictures, "--fit-weights", "--json", "-")
    fitted = json.loads(done.stdout)["fitted_weights"]
    assert fitted["weights"]["right"] > 0.99
    assert fitted["num_fitted"] + fitted["num_judged"] == 21
    assert fitted["is_better"]
    assert [m.weight for m in read_manifest(folder).members] == [1.0, 1.0]  # the average stays


def test_a_member_without_float_has_no_drop(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    manifest = read_manifest(folder)
    first = manifest.members[0]
    only_int8 = first.model_copy(update={"networks": {"INT8": first.networks["INT8"]}})
    members = (only_int8, manifest.members[1])
    write_manifest(folder, manifest.model_copy(update={"members": members}))
    assert evaluated(folder, "--images", pictures).exit_code == 0
    (record,) = read_manifest(folder).accuracy
    assert set(record.drops) == {"unsure"}
    assert set(record.scores["FP16"]) == {"unsure"}  # no ensemble of some of the members


def test_order_and_work_are_kept_by_the_threads() -> None:
    assert list(through_threads(lambda n: n * n, range(50), 3)) == [n * n for n in range(50)]
    assert [list(b) for b in batches(list(range(5)), 2)] == [[0, 1], [2, 3], [4]]


def test_only_a_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for n in range(100):
            taken.append(n)
            yield n

    answers = through_threads(lambda n: n, items(), 2)  # type: ignore[arg-type, var-annotated]
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


def test_batches_give_what_single_images_give(tiny_set: Path, pictures: Path) -> None:
    model_set = load_model_set(str(tiny_set))
    images = read_dataset(pictures, model_set).images
    networks = Networks(model_set, ("INT8",))
    together = networks.predict(images[:8])
    for index, image in enumerate(images[:8]):
        alone = networks.predict([image])
        for name, rows in alone.probabilities["INT8"].items():
            np.testing.assert_allclose(
                rows[0], together.probabilities["INT8"][name][index], atol=1e-5
            )


def test_a_network_that_answers_nan_is_named(tmp_path: Path, pictures: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny", gains={"sure": 8.0, "broken": float("nan")})
    done = evaluated(folder, "--images", pictures)
    assert isinstance(done.exception, ModelSetError), done.output
    assert "broken INT8 answers NaN" in str(done.exception)


def test_too_few_images_to_fit_weights_is_said(tmp_path: Path) -> None:
    images = tmp_path / "one"
    (images / LABELS[0]).mkdir(parents=True)
    (images / LABELS[0] / "x.png").write_bytes(picture("blue"))
    done = evaluated(write_tiny_set(tmp_path / "tiny"), "--images", images, "--fit-weights")
    assert done.exit_code == 0, done.output
    assert "too few images to fit weights" in done.output


def test_networks_that_changed_meanwhile_are_not_recorded(tmp_path: Path, pictures: Path) -> None:
    """Another command may quantise while this one measures: its record is of what was there."""
    folder = two_precisions(tmp_path / "tiny")
    model_set = load_model_set(str(folder))
    found = evaluate(model_set, read_dataset(pictures, model_set), ("FP16", "INT8"))
    record = record_of(model_set, found)
    two_precisions(folder, int8_gain=-8.0)
    with pytest.raises(ModelSetError, match="changed while they were measured"):
        keep(folder, record)
    assert read_manifest(folder).accuracy == ()
    assert sorted(p.suffix for p in folder.iterdir() if p.name.startswith(".")) == []


def test_weights_that_changed_meanwhile_are_not_recorded(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    model_set = load_model_set(str(folder))
    found = evaluate(model_set, read_dataset(pictures, model_set), ("FP16", "INT8"))
    first, *others = model_set.manifest.members
    edited = (first.model_copy(update={"weight": 9.0}), *others)
    write_manifest(folder, model_set.manifest.model_copy(update={"members": edited}))
    with pytest.raises(ModelSetError, match="weights or image rule, were changed"):
        keep(folder, record_of(model_set, found))
    assert read_manifest(folder).accuracy == ()


def test_a_set_that_other_images_refuse_is_said_to_be_refused(
    tmp_path: Path, pictures: Path
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    bad = with_accuracy(read_manifest(folder), {ENSEMBLE: 1.0}, {ENSEMBLE: 0.5}, dataset="others")
    write_manifest(folder, bad)
    done = evaluated(folder, "--images", pictures)
    assert done.exit_code == 1
    assert "not by these images, but by others" in done.stderr
    assert "costs ensemble 50.00 points of top-1 on others" in done.stderr


def test_a_set_that_cannot_be_written_is_reported_all_the_same(
    tmp_path: Path, pictures: Path
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    with change(folder):  # somebody else is at work on it
        done = evaluated(folder, "--images", pictures)
    assert isinstance(done.exception, ModelSetError)
    assert "another command is changing" in str(done.exception)
    assert "1.0000" in done.stdout
