"""``tandem evaluate --sure-at``, ``--calibrate``: what is found is judged, written, served by."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.commands import fit as command
from calibration.datasets import LabelledImage
from calibration.evaluation import fitting
from calibration.evaluation.inference import AnsweredBatch
from calibration.sets.transaction import write_manifest
from models.ensemble import SureRecord, tempered
from models.errors import ModelSetError
from models.ledger import judge
from models.manifest import ENSEMBLE, Manifest, read_manifest
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.plans import plan_of
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_pictures, write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


NUM_CLASSES = 12


def rows_of(manifest: Manifest, rows: dict[str, np.ndarray], truth: np.ndarray) -> fitting.Rows:
    """Collect rows of images that are no files, in batches; a name decides an image's part."""
    collected = fitting.Rows(manifest, "INT8")
    images = [LabelledImage(Path(f"no/{n}.png"), int(index)) for n, index in enumerate(truth)]
    for part in (slice(0, 400), slice(400, None)):
        answers = {name: own[part] for name, own in rows.items()}
        collected.add(AnsweredBatch(images[part], [], {"INT8": answers}, []))
    collected.add(AnsweredBatch([], [], {}, []))
    return collected


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny"))


def test_an_image_is_in_one_part_and_its_copies_are_too(tmp_path: Path) -> None:
    counts = Counter(fitting.part_of(Path(f"no/{n}.png")) for n in range(4000))
    assert [counts[part] / 4000 for part in ("fit", "choose", "judge")] == pytest.approx(
        [0.25, 0.25, 0.5], abs=0.03
    )
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"the same")
    assert fitting.part_of(tmp_path / "a.png") == fitting.part_of(tmp_path / "b.png")


def test_the_lowest_bound_that_shows_the_share(manifest: Manifest) -> None:
    confidence = np.float32(0.6) + np.float32(0.4) * np.arange(1000) / 1000
    truth = np.array([0 if p >= 0.8 or number % 2 else 1 for number, p in enumerate(confidence)])
    rows, truth = np.stack([confidence, 1 - confidence], axis=1).astype(np.float32), truth
    # Half of the images are right from 0.8 on; with x of those below (0.5 + x/2) / (0.5 + x) are.
    # Of 600 images 0.92 must be right to show 0.9 with 95 % confidence: x is 0.095, not 0.125.
    answers, none = fitting.Answers(rows, truth), fitting.Answers(rows[:0], truth[:0])
    bound = fitting.choose_bound(answers, 0.9)
    assert bound == pytest.approx(0.8 - 0.4 * 0.095, abs=0.01)
    assert fitting.choose_bound(answers, 0.99) == pytest.approx(0.8, abs=0.003)
    assert bound is not None
    of_these = rows_of(manifest, {"sure": rows, "unsure": rows}, truth)
    sure = fitting.judged_bound(bound, answers, 0.9, of_these)
    assert sure.share == pytest.approx(0.595, abs=0.03)
    assert sure.right == pytest.approx(0.92, abs=0.02)
    low, high = sure.right_interval
    assert low < sure.right < high
    assert fitting.judged_bound(0.999999, answers, 0.9, of_these).right is None
    assert fitting.judged_bound(0.5, none, 0.9, of_these) is None
    few = fitting.Answers(rows[-40:], truth[-40:])
    assert fitting.choose_bound(few, 0.9) is None  # too few to show anything
    assert fitting.choose_bound(fitting.Answers(rows, 1 - truth), 0.6) is None


def test_wrong_answers_that_count_twice_raise_bound_and_temperature(manifest) -> None:
    rows, truth = drawn(4000, 5)
    answers = fitting.Answers(rows, truth)
    once, twice = (fitting.choose_bound(answers, 0.8, weight) for weight in (1, 2))
    assert once is not None
    assert twice is not None
    assert twice > once + 0.05
    is_sure = rows.max(axis=1) >= twice
    wrong = int((rows.argmax(axis=1) != truth)[is_sure].sum())
    collected = rows_of(manifest, {"sure": rows, "unsure": rows}, truth)
    collected.wrong_weight = 2.0
    record = fitting.judged_bound(twice, answers, 0.8, collected)
    expected = (is_sure.sum() - wrong) / (is_sure.sum() + wrong)
    assert record.right == pytest.approx(expected, abs=1e-4)
    assert record.right_interval[0] >= 0.8
    assert record.wrong_weight == 2.0
    assert fitting.fit_temperature(rows, truth, 2.0) > fitting.fit_temperature(rows, truth) + 0.1


def test_few_foreign_images_reach_a_bound_and_others_say_how_many(manifest: Manifest) -> None:
    """The first class of foreign images is from 0.5 to 0.9 likely: 5 % reach 0.88."""
    rows, truth = drawn(6000, 4)
    flat = np.full((2000, NUM_CLASSES), 0.0, np.float32)
    flat[:, 0] = np.random.default_rng(1).uniform(0.5, 0.9, 2000)
    flat[:, 1] = 1 - flat[:, 0]
    foreign = rows_of(manifest, {"sure": flat, "unsure": flat}, np.full(2000, -1))
    foreign.dataset = "others/all"
    collected = rows_of(manifest, {"sure": rows, "unsure": rows}, truth)
    alone = fitting.fit_trust(manifest, collected, 0.8).sure
    collected.foreign = foreign
    fitted = fitting.fit_trust(manifest, collected, 0.8)
    assert alone.foreign is None
    assert alone.probability < 0.8
    for record in (fitted.sure, *(subset.sure for subset in fitted.trust)):
        assert record.probability == pytest.approx(0.88, abs=0.012)
        assert record.foreign.share == pytest.approx(0.05, abs=0.02)
        assert record.foreign.interval[0] < record.foreign.share < record.foreign.interval[1]
        assert record.foreign.num_images == foreign.mask("judge").sum()
        assert record.foreign.dataset == "others/all"
    collected.foreign = rows_of(manifest, {"sure": flat[:9], "unsure": flat[:9]}, truth[:9])
    with pytest.raises(ModelSetError, match=r"--foreign has 9 images: .* at least 200"):
        fitting.fit_trust(manifest, collected, 0.8)


def test_the_whole_plan_keeps_to_the_share_of_foreign_images(manifest: Manifest) -> None:
    rows, truth = drawn(6000, 4)
    likely = np.random.default_rng(2).uniform(0.5, 0.85, 2000).astype(np.float32)
    flat = np.zeros((2000, NUM_CLASSES), np.float32)
    flat[:, 0], flat[:, 1] = likely, 1 - likely
    foreign = rows_of(manifest, {"sure": flat, "unsure": flat}, np.full(2000, -1))
    collected = rows_of(manifest, {"sure": rows, "unsure": tempered(rows, 1.5)}, truth)
    asks = ((("sure",), 0.7), (("unsure",), None))
    plan = plan_of(manifest.plan_key("INT8"), asks)
    alone = fitting.with_bounds(plan, collected, 0.8)
    collected.foreign = foreign
    steps = fitting.with_bounds(plan, collected, 0.8).steps
    assert [round(step.share, 3) for step in steps] == [
        round(step.share, 3) for step in alone.steps
    ]
    assert alone.steps[0].sure.probability < 0.8
    judged: list[Any] = [step.sure.foreign for step in steps]
    num_sure = sum(float(own.share) * own.num_images for own in judged)
    assert num_sure / foreign.mask("judge").sum() == pytest.approx(0.05, abs=0.02)
    assert min(step.sure.probability for step in steps) > 0.82


@settings(max_examples=60, deadline=None, database=None)
@given(
    rows=hnp.arrays(np.float32, (99, 4), elements=st.floats(0.0, 1.0, width=32), fill=st.nothing()),
    truth=hnp.arrays(np.int64, 99, elements=st.integers(0, 3)),
)
def test_an_answer_set_holds_as_many_as_the_theorem_says(rows, truth) -> None:
    """Of 99 images the bound may leave out five at most, which are (99 + 1) * 0.05."""
    bound = fitting.answer_set_bound(rows, truth)
    held = fitting.in_answer_set(rows, bound)
    assert (~held[np.arange(99), truth]).sum() <= 99 - 95
    assert held[np.arange(99), rows.argmax(axis=1)].all()
    record = fitting.judged_set(bound, rows, truth)
    assert record.coverage >= 0.9494
    assert record.mean_size == pytest.approx(held.sum() / 99, abs=1e-3)


def test_of_new_images_as_many_sets_hold_the_right_class() -> None:
    rows, truth = drawn(8000, 3)
    assert fitting.judged_set(
        fitting.answer_set_bound(rows[:4000], truth[:4000]), rows[4000:], truth[4000:]
    ).coverage == pytest.approx(0.95, abs=0.015)


def test_each_average_of_the_members_has_bounds_of_its_own(manifest: Manifest) -> None:
    rows, truth = drawn(6000, 2)
    members = {"sure": rows, "unsure": tempered(rows, 2.0)}
    fitted = fitting.fit_trust(manifest, rows_of(manifest, members, truth), 0.8)
    assert [subset.members for subset in fitted.trust] == [("sure",), ("unsure",)]
    assert [subset.temperature for subset in fitted.trust] == [1.0, 1.0]
    records: list[Any] = [fitted, *fitted.trust]
    for record in records:
        assert record.sure.right > 0.77
        assert record.sure.num_images == record.answer_set.num_images
        assert record.answer_set.coverage == pytest.approx(0.95, abs=0.03)
    assert fitted.trust[0].sure.probability > fitted.trust[1].sure.probability
    with pytest.raises(ModelSetError, match=r"--sure-at 0\.999: no probability leaves 50 of \d+"):
        fitting.fit_trust(manifest, rows_of(manifest, members, truth), 0.999)
    few = {name: own[:150] for name, own in members.items()}
    with pytest.raises(ModelSetError, match=r"--sure-at has .* at least 100 of each"):
        fitting.fit_trust(manifest, rows_of(manifest, few, truth[:150]), 0.9)


def test_more_rows_than_memory_has_room_for_are_refused(manifest, monkeypatch) -> None:
    monkeypatch.setattr("calibration.evaluation.fitting.MAX_VALUES", 1000)
    rows, truth = drawn(800, 2)
    with pytest.raises(ModelSetError, match=r"the limit is 1: give --max-images \d+ or fewer"):
        rows_of(manifest, {"sure": rows, "unsure": rows}, truth)


def test_the_command_writes_it_and_calibrating_takes_it_away(tmp_path: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=180, side=16)
    before = load_model_set(str(folder)).fingerprint()
    done = evaluated(folder, "--images", many, "--sure-at", "0.9", "--no-record", "--json", "-")
    assert done.exit_code == 0, done.output
    assert read_manifest(folder).sure is None
    done = evaluated(folder, "--images", many, "--sure-at", "0.9", "--json", tmp_path / "sure.json")
    assert done.exit_code == 0, done.output
    assert "100.0% of them right" in done.output
    sure = read_manifest(folder).sure
    assert sure is not None
    assert (sure.target, sure.share, sure.right) == (0.9, 1.0, 1.0)
    facts = json.loads((tmp_path / "sure.json").read_text("utf-8"))
    assert SureRecord.model_validate({k: facts[k] for k in SureRecord.model_fields}) == sure
    model_set = load_model_set(str(folder))
    assert model_set.fingerprint() != before
    assert model_set.trust.whole.sure_from == sure.probability
    trust = {record.members: record for record in model_set.manifest.trust}
    assert facts["trust"] == [record.model_dump(mode="json") for record in trust.values()]
    for name, weight in (("sure", 1.0), ("unsure", 3.0)):
        assert model_set.weighted({name: weight}).manifest.sure == trust[(name,)].sure
    assert model_set.weighted({"sure": 2.0, "unsure": 2.0}).manifest.sure == sure
    assert model_set.weighted({"sure": 2.0, "unsure": 1.0}).manifest.sure is None
    done = evaluated(folder, "--images", many, "--calibrate")
    assert done.exit_code == 0, done.output
    assert read_manifest(folder).sure is None


@pytest.mark.parametrize("option", [("--sure-at", "0.9"), ("--calibrate",)])
def test_what_was_fitted_is_shown_if_it_cannot_be_written(tmp_path, monkeypatch, option):
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=180, side=16)
    changed = read_manifest(folder).model_copy(update={"description": "another"})
    monkeypatch.setattr(command, "read_manifest", lambda _: changed)
    kept = tmp_path / "fitted.json"
    done = evaluated(folder, "--images", many, *option, "--json", kept)
    assert "was changed meanwhile" in str(done.exception)
    assert done.stdout
    assert json.loads(kept.read_text("utf-8"))["set"] == "tiny"


def test_what_it_does_not_go_with_is_refused(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures, "--calibrate", "--sure-at", "0.9")
    assert "--sure-at: --calibrate fits temperatures and evaluates nothing else" in str(
        done.exception
    )
    scored = write_scored_set(tmp_path / "scored")
    done = evaluated(scored, "--images", pictures, "--sure-at", "0.9")
    assert "multi-label" in str(done.exception)
    manifest = read_manifest(scored).model_dump() | {
        "sure": {
            "probability": 0.5,
            "target": 0.9,
            "num_images": 1,
            "share": 1,
            "right": 1,
            "right_interval": (0, 1),
        }
    }
    with pytest.raises(ValueError, match="sure is of classes that exclude each other"):
        Manifest.model_validate(manifest)


def drawn(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (N, C) that are right, and classes drawn by them."""
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.normal(0, 2, (num_images, NUM_CLASSES)))
    rows /= rows.sum(axis=1, keepdims=True)
    truth = np.array([generator.choice(NUM_CLASSES, p=row) for row in rows])
    return rows.astype(np.float32), truth


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_temperature_that_was_taken_away_is_found(temperature: float) -> None:
    rows, truth = drawn(4000, 1)
    found = fitting.fit_temperature(tempered(rows, 1 / temperature), truth)
    assert found == pytest.approx(temperature, rel=0.06)


def test_probabilities_of_zero_and_members_that_are_always_right_are_no_trouble() -> None:
    rows = np.eye(NUM_CLASSES, dtype=np.float32)
    assert fitting.fit_temperature(rows, np.arange(NUM_CLASSES)) == pytest.approx(0.2, rel=0.01)
    assert fitting.fit_temperature(rows, np.arange(NUM_CLASSES)[::-1]) == pytest.approx(
        20, rel=0.01
    )


def test_each_member_then_the_average_judged_on_others(manifest: Manifest) -> None:
    rows, truth = drawn(4000, 2)
    members = {name: tempered(rows, 1 / t) for name, t in (("sure", 2.0), ("unsure", 0.5))}
    collected = rows_of(manifest, members, truth)
    done = fitting.fit_temperatures(collected)
    assert done.temperatures["sure"] == pytest.approx(2.0, rel=0.08)
    assert done.temperatures["unsure"] == pytest.approx(0.5, rel=0.08)
    assert done.temperatures[ENSEMBLE] == pytest.approx(1.0, rel=0.08)  # of alike members
    counts = [int(collected.mask(part).sum()) for part in ("fit", "judge")]
    assert [done.num_fitted, done.num_judged] == counts
    for name in ("sure", "unsure"):
        assert done.before[name].top1 == done.after[name].top1
        assert done.before[name].calibration_error > 0.1
        assert done.after[name].calibration_error < 0.04
        assert done.after[name].log_likelihood > done.before[name].log_likelihood
    assert done.after[ENSEMBLE].calibration_error < 0.04


def test_too_few_images_are_refused(manifest: Manifest) -> None:
    rows, truth = drawn(150, 2)
    with pytest.raises(ModelSetError, match="at least 100 of each"):
        fitting.fit_temperatures(rows_of(manifest, {"sure": rows, "unsure": rows}, truth))


def test_the_command_writes_them_and_what_was_measured_before_holds_no_more(tmp_path: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=180, side=16)
    assert evaluated(folder, "--images", many).exit_code == 0
    before = load_model_set(str(folder))
    judged_before = before.manifest
    assert judge(before.manifest).status == "verified"
    kept = tmp_path / "fitted.json"
    done = evaluated(folder, "--images", many, "--calibrate", "--json", kept)
    assert done.exit_code == 0, done.output
    facts = json.loads(kept.read_text("utf-8"))
    after = load_model_set(str(folder))
    assert after.manifest.temperatures == facts["temperatures"]
    assert after.manifest.temperatures["sure"] < 1  # all are right: it may be surer
    assert (facts["num_fitted"], facts["num_judged"]) != (0, 0)
    assert 100 <= facts["num_fitted"] < facts["num_judged"] < 540 - facts["num_fitted"]
    assert after.fingerprint() != before.fingerprint()
    assert load_model_set(f"{folder}@{before.fingerprint()}").manifest == judged_before
    assert after.manifest.made.by == "tandem evaluate --calibrate"
    assert judge(after.manifest).status == "unmeasured"
    again = evaluated(folder, "--images", many, "--calibrate", "--no-record", "--json", kept)
    assert again.exit_code == 0, again.output
    assert json.loads(kept.read_text("utf-8"))["temperatures"] == facts["temperatures"]
    fitted = read_manifest(folder)
    sample = evaluated(folder, "--images", many, "--calibrate", "--max-images", 480)
    assert sample.exit_code == 0, sample.output
    assert "a sample's result is shown, and not written" in sample.stderr
    assert read_manifest(folder) == fitted
    assert evaluated(folder, "--images", many).exit_code == 0
    assert judge(read_manifest(folder)).status == "verified"


def test_what_it_does_not_go_with_is_refused_temperatures(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures, "--calibrate", "--plan")
    assert "--calibrate fits temperatures and evaluates nothing else" in str(done.exception)
    done = evaluated(folder, "--images", pictures, "--calibrate")
    assert "at least 100 of each" in str(done.exception)
    assert set(read_manifest(folder).temperatures.values()) == {1.0}


def test_temperatures_are_those_that_can_be_and_go_with_weights_of_others(tmp_path):
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.2"):
        Manifest.model_validate({"temperature": 0.1})
    folder = write_tiny_set(tmp_path / "tiny")
    manifest = read_manifest(folder)
    found = {"sure": 2.0, "unsure": 0.5, ENSEMBLE: 0.75}
    write_manifest(folder, fitting.with_temperatures(manifest, found))
    weighted = load_model_set(str(folder)).weighted({"sure": 2.0})
    assert weighted.manifest.temperatures == {"sure": 2.0, ENSEMBLE: 1.0}
