"""``tandem evaluate`` of a multi-label set; its figures compared with scikit-learn's."""

import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from calibration.evaluation import evaluate as multi_label
from calibration.evaluation.evaluate import average_precision, drop_of, measured
from calibration.sets.transaction import write_manifest
from models.ensemble import above
from models.ledger import judge, judged, outcome_of
from models.manifest import ENSEMBLE, Network, read_manifest
from models.record import MultiLabelDrop, MultiLabelScore, Precision
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
NUM_IMAGES, NUM_CLASSES = 300, 6


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_scored_images(tmp_path_factory.mktemp("images"), num_per_picture=6)


def two_precisions(folder, gain=1.0):
    """A set whose INT8 networks are made, not quantised: the float ones' gain times ``gain``."""
    write_scored_set(folder, precision="FP16")
    manifest = read_manifest(folder)
    members = []
    for member in manifest.members:
        network = save_model(scored_model(GAINS[member.name] * gain), folder, f"{member.name}-int8")
        networks: dict[Precision, Network] = {**member.networks, "INT8": network}
        members.append(member.model_copy(update={"networks": networks}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members), "golden": None}))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A multi-label set whose members have both precisions."""
    return two_precisions(tmp_path / "scored")


def test_right_networks_are_right_and_verified(folder, tmp_path, images):
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


def test_another_threshold_is_not_as_it_was_measured(folder, images):
    assert evaluated(folder, "--images", images).exit_code == 0
    verdict = judge(read_manifest(folder).model_copy(update={"threshold": 0.7}))
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


def test_everything_as_json(folder, images):
    told = json.loads(evaluated(folder, "--images", images, "--no-record", "--json", "-").stdout)
    assert (told["task"], told["threshold"], told["num_labels"]) == ("multi_label", 0.5, 36)
    assert told["exact_match"]["INT8"] == {"steep": 1.0, "flat": 1.0, ENSEMBLE: 1.0}
    assert told["scores"]["INT8"][ENSEMBLE]["micro_f1"] == 1.0
    assert read_manifest(folder).accuracy == ()


def test_a_sample_and_what_cannot_be_read(folder, tmp_path, images):
    source = tmp_path / "list.csv"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines = images.read_text("utf-8").splitlines()[1:]
    rows = [f"{images.parent / line}" for line in lines]
    source.write_text("\n".join(["file,labels", *rows, "bad.png,has red"]), "utf-8")
    assert "1 images cannot be read" in evaluated(folder, "--images", source).stdout
    assert read_manifest(folder).accuracy[0].num_images == 24
    few = evaluated(folder, "--images", source, "--max-images", 20, "--json", "-")
    assert "a random sample of 20 of 25 images" in json.loads(few.stdout)["notes"]


@pytest.mark.parametrize("option", ["--html=page.html"])
def test_what_is_of_classes_that_exclude_each_other(tmp_path, images, option, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = evaluated(write_scored_set(tmp_path / "scored"), "--images", images, option)
    assert option.partition("=")[0] in str(done.exception)
    assert "this set is multi-label" in str(done.exception)
    assert not (tmp_path / "page.html").exists()


def test_classes_of_the_list_are_the_sets(tmp_path):
    folder = write_scored_set(tmp_path / "scored")
    source = tmp_path / "list.csv"
    source.write_text(f"a.png,{LABELS[0]};yellow\n", "utf-8")
    assert "yellow" in str(evaluated(folder, "--images", source).exception)


def drawn(noise: float, seed: int = 0, decimals: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Return scores that follow the labels more or less, and the labels."""
    rng = np.random.default_rng(4)
    truth = rng.random((NUM_IMAGES, NUM_CLASSES)) < np.linspace(0.02, 0.5, NUM_CLASSES)
    scores = (1 - noise) * truth + noise * np.random.default_rng((5, seed)).random(truth.shape)
    return np.round(scores, decimals).astype(np.float32), truth


@pytest.mark.parametrize("decimals", [7, 1], ids=["all differ", "many tie"])
@pytest.mark.parametrize("noise", [0.2, 0.7, 1.0])
def test_the_figures_are_scikit_learns(noise, decimals):
    scores, truth = drawn(noise, decimals=decimals)
    score = measured(scores, truth, 0.4).score
    answered = above(scores, 0.4)
    mean = average_precision_score(truth, scores, average="macro")
    assert score.mean_average_precision == pytest.approx(mean, abs=1e-4)
    for average, found in (("micro", score.micro_f1), ("macro", score.macro_f1)):
        expected = f1_score(truth, answered, average=average, zero_division=0)
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_class_without_images_is_not_in_the_means():
    scores, truth = drawn(0.5)
    truth[:, 0] = False
    score = measured(scores, truth, 0.5).score
    rest = slice(1, None)
    mean = average_precision_score(truth[:, rest], scores[:, rest], average="macro")
    assert score.mean_average_precision == pytest.approx(mean, abs=1e-4)
    of_rest = f1_score(truth[:, rest], above(scores, 0.5)[:, rest], average="macro")
    assert score.macro_f1 == pytest.approx(of_rest, abs=1e-4)


def test_counting_an_image_twice_is_to_have_it_twice():
    scores, truth = drawn(0.6, decimals=1)
    counts = np.random.default_rng(1).integers(0, 4, NUM_IMAGES)
    repeated = np.repeat(np.arange(NUM_IMAGES), counts)
    for column in range(1, NUM_CLASSES):
        (found,) = average_precision(
            scores[:, column], truth[:, column], counts[None].astype(np.float32)
        )
        expected = average_precision_score(truth[repeated, column], scores[repeated, column])
        assert found == pytest.approx(expected, abs=1e-9)


def test_right_answers_have_all_of_every_figure_and_nothing_right_no_f1():
    _, truth = drawn(0.5)
    score = measured(truth.astype(np.float32), truth, 0.5).score
    assert score.mean_average_precision == score.micro_f1 == score.macro_f1 == 1
    assert score.mean_average_precision_interval == (1, 1)
    scores, truth = drawn(0.5)
    score = measured(scores * np.float32(0.1), truth, 0.9).score
    assert (score.micro_f1, score.macro_f1) == (0, 0)
    assert score.mean_average_precision > 0.9  # their order is all right


def test_an_interval_covers_the_figure_of_other_images_as_often_as_it_says():
    """Of 60 samples of images, the population's mAP is outside of few intervals."""
    rng = np.random.default_rng(6)
    truth = rng.random((6000, 4)) < 0.3
    scores = (0.45 * truth + 0.55 * rng.random(truth.shape)).astype(np.float32)
    population = average_precision_score(truth, scores, average="macro")
    missed = 0
    for _ in range(60):
        some = rng.choice(6000, 150, replace=False)
        low, high = measured(scores[some], truth[some], 0.5).score.mean_average_precision_interval
        missed += not low <= population <= high
    assert missed <= 10  # 3 expected; more than 10 once in some 10,000 runs of such samples


def test_a_label_so_rare_that_resamples_lack_it():
    truth = np.zeros((40, 2), np.bool_)
    truth[7, 1] = True
    score = measured(np.random.default_rng(2).random((40, 2), np.float32), truth, 0.5).score
    assert 0 < score.mean_average_precision <= 1
    low, high = score.mean_average_precision_interval
    assert 0 <= low <= score.mean_average_precision <= high <= 1


def test_what_was_lost_is_of_the_same_images():
    before, truth = drawn(0.7)
    after, _ = drawn(0.72)
    drop = drop_of(measured(before, truth, 0.5), measured(after, truth, 0.5))
    first, second = measured(before, truth, 0.5).score, measured(after, truth, 0.5).score
    lost = first.mean_average_precision - second.mean_average_precision
    assert drop.mean_average_precision == pytest.approx(lost, abs=2e-4)
    low, high = drop.mean_average_precision_interval
    width = np.diff(first.mean_average_precision_interval)[0]
    assert low <= drop.mean_average_precision <= high
    assert high - low < width  # much of the chance is in both
    same = drop_of(measured(before, truth, 0.5), measured(before, truth, 0.5))
    assert (same.mean_average_precision, same.micro_f1_interval) == (0, (0, 0))


def lost(drop: MultiLabelDrop) -> dict[str, float]:
    return {loss.figure: loss.lost for loss in drop.losses}


def test_each_figures_loss_is_enough_to_refuse():
    scores, truth = drawn(0.3)
    before = measured(scores, truth, 0.5)
    weaker = drop_of(before, measured(scores * np.float32(0.5), truth, 0.5))  # the same order
    assert weaker.mean_average_precision == 0
    assert lost(weaker) == {"mAP": 0, "micro-F1": weaker.micro_f1}
    assert outcome_of(judged({"": weaker}, len(truth), 0.05)) == "refused"
    assert weaker.micro_f1 > 0.1
    scores, truth = drawn(0.6)  # some unlike their labels: an order to lose
    before = measured(scores, truth, 0.5)
    rng = np.random.default_rng(8)
    shuffled = np.where(scores >= 0.5, 0.5 + 0.5 * rng.random(scores.shape), scores)
    worse = drop_of(before, measured(shuffled.astype(np.float32), truth, 0.5))
    assert worse.micro_f1 == 0
    assert lost(worse) == {"mAP": worse.mean_average_precision, "micro-F1": 0}
    assert worse.mean_average_precision > 0.1
    assert outcome_of(judged({"": worse}, len(truth), 0.05)) == "refused"


def test_memory_is_bounded_and_changes_nothing(monkeypatch):
    scores, truth = drawn(0.5)
    at_once = measured(scores, truth, 0.5)
    monkeypatch.setattr(multi_label, "MAX_CELLS", 7 * NUM_IMAGES)
    np.testing.assert_allclose(measured(scores, truth, 0.5).resamples, at_once.resamples)
