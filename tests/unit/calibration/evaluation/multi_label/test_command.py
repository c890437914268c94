"""``tandem evaluate`` of a multi-label set: figures, the record, the gate, refusals."""

import json
from pathlib import Path

import pytest

from calibration.sets.durable import write_manifest
from models.accuracy import ENSEMBLE, MultiLabelScore
from models.ledger import judge
from models.manifest import Network, read_manifest
from models.record import Precision
from tests.support.calibration.evaluated_sets import evaluated
from tests.support.command_line import tandem
from tests.support.scored_sets import (
    GAINS,
    LABELS,
    scored_model,
    write_scored_images,
    write_scored_set,
)
from tests.support.tiny_networks import save_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scored_images(tmp_path_factory.mktemp("images"), num_per_picture=6)


def two_precisions(folder: Path, gain: float = 1.0) -> Path:
    """A set whose INT8 networks are made, not quantised: the float ones' gain times ``gain``."""
    write_scored_set(folder, precision="FP16")
    manifest = read_manifest(folder)
    members = []
    for member in manifest.members:
        model = scored_model(GAINS[member.name] * gain)
        network = save_model(model, folder, f"{member.name}-int8")
        networks: dict[Precision, Network] = {**member.networks, "INT8": network}
        members.append(member.model_copy(update={"networks": networks}))
    changed = manifest.model_copy(update={"members": tuple(members), "golden": None})
    write_manifest(folder, changed)
    return folder


def test_right_networks_are_right_and_verified(tmp_path, images):
    folder = two_precisions(tmp_path / "scored")
    done = evaluated(folder, "--images", images)
    assert done.exit_code == 0, done.output
    assert "24 images, 36 labels" in done.stdout
    manifest = read_manifest(folder)
    (record,) = manifest.accuracy
    assert record.conditions.threshold == 0.5
    for precision in ("FP16", "INT8"):
        for name in (*GAINS, ENSEMBLE):
            score = record.scores[precision][name]
            assert isinstance(score, MultiLabelScore)
            assert score.mean_average_precision == score.micro_f1 == score.macro_f1 == 1
    assert {name: {loss.lost for loss in d.losses} for name, d in record.drops.items()} == (
        {name: {0.0} for name in (*GAINS, ENSEMBLE)}
    )
    assert judge(manifest).status == "unknown"  # 24 images are few
    told = json.loads(tandem("models", "list", "--json", "--model-dir", tmp_path).stdout)
    (facts,) = [one for one in told if one["name"] == "scored"]
    assert (facts["task"], facts["threshold"]) == ("multi_label", 0.5)
    assert facts["mean_average_precision"] == {"FP16": 1.0, "INT8": 1.0}
    assert facts["top1"] == {}
    table = tandem("models", "list", "--model-dir", tmp_path).stdout
    assert "INT8 1.0000 mAP" in table
    assert "3 labels" in table


def test_another_threshold_is_not_as_it_was_measured(tmp_path, images):
    folder = two_precisions(tmp_path / "scored")
    assert evaluated(folder, "--images", images).exit_code == 0
    manifest = read_manifest(folder).model_copy(update={"threshold": 0.7})
    verdict = judge(manifest)
    assert verdict.status == "unmeasured"
    assert "the threshold changed since it was measured" in verdict.message


def test_wrong_int8_is_an_exit_code_a_record_and_a_refusal(tmp_path, images):
    folder = two_precisions(tmp_path / "scored", gain=-1.0)
    done = evaluated(folder, "--images", images)
    assert done.exit_code == 1
    assert "over +0.50" in done.stdout
    verdict = judge(read_manifest(folder))
    assert verdict.status == "dropped"
    assert "points of micro-F1 on" in verdict.message or "points of mAP on" in verdict.message


def test_everything_as_json(tmp_path, images):
    folder = two_precisions(tmp_path / "scored")
    done = evaluated(folder, "--images", images, "--no-record", "--json", "-")
    told = json.loads(done.stdout)
    assert (told["task"], told["threshold"], told["num_labels"]) == ("multi_label", 0.5, 36)
    assert told["exact_match"]["INT8"] == {"steep": 1.0, "flat": 1.0, ENSEMBLE: 1.0}
    assert told["scores"]["INT8"][ENSEMBLE]["micro_f1"] == 1.0
    assert read_manifest(folder).accuracy == ()


def test_a_sample_and_what_cannot_be_read(tmp_path, images):
    folder = two_precisions(tmp_path / "scored")
    source = tmp_path / "list.csv"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines = images.read_text("utf-8").splitlines()[1:]
    rows = [f"{images.parent / line}" for line in lines]
    source.write_text("\n".join(["file,labels", *rows, "bad.png,has red"]), "utf-8")
    done = evaluated(folder, "--images", source)
    assert "1 images cannot be read" in done.stdout
    assert read_manifest(folder).accuracy[0].num_images == 24
    few = evaluated(folder, "--images", source, "--max-images", 20, "--json", "-")
    assert "a random sample of 20 of 25 images" in json.loads(few.stdout)["notes"]


@pytest.mark.parametrize("option", ["--subsets", "--html=page.html"])
def test_what_is_of_classes_that_exclude_each_other(tmp_path, images, option, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_scored_set(tmp_path / "scored")
    done = evaluated(folder, "--images", images, option)
    assert option.partition("=")[0] in str(done.exception)
    assert "this set is multi-label" in str(done.exception)
    assert not (tmp_path / "page.html").exists()


def test_classes_of_the_list_are_the_sets(tmp_path):
    folder = write_scored_set(tmp_path / "scored")
    source = tmp_path / "list.csv"
    source.write_text(f"a.png,{LABELS[0]};yellow\n", "utf-8")
    assert "yellow" in str(evaluated(folder, "--images", source).exception)
