"""The search of a fast plan: what is tried, what is chosen, and the command that writes it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.datasets import LabelledImage
from calibration.evaluation.fitting import Rows, part_of
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.plans import MAX_LOST, PlanSearch, candidates, carried_over, search
from models.ensemble import average, by_plan
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.cases import cases
from tests.support.plans import plan_of
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_pictures, write_tiny_set

COSTS = {"dear": 9.0, "cheap": 1.0}
NUM_CLASSES = 4
PROBABILITIES = st.sampled_from([0.25, 0.5, 0.7, 0.9]) | st.floats(0.0625, 1, width=32)


def drawn(num_images: int, seed: int = 3, hard: float = 0.2) -> tuple[dict, np.ndarray]:
    """Return rows of two members and the truth; ``cheap`` knows nothing of the hard images."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, NUM_CLASSES, num_images)
    is_hard = rng.random(num_images) < hard
    rows = {}
    for name, signal in (("dear", 6.0), ("cheap", np.where(is_hard, 0.0, 8.0))):
        scores = rng.normal(size=(num_images, NUM_CLASSES))
        scores[np.arange(num_images), truth] += signal
        raised = np.exp(scores)
        rows[name] = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
    return rows, truth


def rows_of(manifest: Manifest, rows: dict, truth: np.ndarray, size: int = 64) -> Rows:
    collected = Rows(manifest, "INT8")
    images = [LabelledImage(Path(f"no/{n}.png"), int(t)) for n, t in enumerate(truth)]
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        answers = {name: own[part] for name, own in rows.items()}
        collected.add(AnsweredBatch(images[part], [], {"INT8": answers}, []))
    collected.add(AnsweredBatch([], [], {}, []))
    return collected


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    folder = tmp_path_factory.mktemp("set") / "two"
    return read_manifest(write_tiny_set(folder, gains=dict.fromkeys(COSTS, 4.0)))


def searched(manifest: Manifest, rows: dict, truth: np.ndarray, costs=None) -> PlanSearch:
    return search(manifest, rows_of(manifest, rows, truth), "INT8", costs or COSTS, "drawn", "0")


@pytest.fixture(scope="module")
def result(manifest) -> PlanSearch:
    rows, truth = drawn(2400)
    return searched(manifest, rows, truth)


@pytest.mark.parametrize(
    ("num_members", "num_one", "num_two", "num_three"),
    [(2, 2, 2, 0), (3, 6, 12, 6), (5, 15, 15, 20), (8, 36, 36, 56)],
)
def test_what_is_tried(num_members, num_one, num_two, num_three):
    tried = list(candidates([f"m{n}" for n in range(num_members)]))
    assert len(set(tried)) == len(tried)
    assert [sum(len(asks) == n for asks in tried) for n in (1, 2, 3)] == [
        num_one,
        num_two,
        num_three,
    ]
    assert all(len({m for ask in asks for m in ask}) == sum(map(len, asks)) for asks in tried)


def test_the_cheap_one_is_asked_first_and_the_other_where_it_does_not_know(result):
    assert [step.ask for step in result.record.steps] == [("cheap",), ("dear",)]
    assert result.record.steps[0].share == pytest.approx(0.8, abs=0.06)
    assert result.best.speed > 3
    judged, chosen = result.record.judged, result.record.chosen
    assert abs(judged.lost) <= MAX_LOST
    assert (result.outcome, judged.lost_interval[1] <= MAX_LOST) == ("verified", True)
    assert judged.num_images == pytest.approx(2 * chosen.num_images, rel=0.1)


def test_a_plan_for_other_temperatures_lets_as_many_go_on(manifest, result):
    """Thresholds follow the probabilities; the answers of each step stay about the same images."""
    rows, truth = drawn(2400)
    before = rows_of(manifest, rows, truth)
    unsure = before.with_temperatures(dict.fromkeys(COSTS, 2.0), 2.0)
    assert unsure.wrong_weight == 2.0
    assert (unsure.members["cheap"].max(axis=1) < before.members["cheap"].max(axis=1)).all()
    plan = carried_over(result, before, manifest, unsure)
    assert [step.ask for step in plan.steps] == [step.ask for step in result.record.steps]
    assert plan.steps[0].stop_at < result.record.steps[0].stop_at
    for now, old in zip(plan.steps, result.record.steps, strict=True):
        assert now.share == pytest.approx(old.share, abs=0.01)
    assert plan.judged.top1 == pytest.approx(result.record.judged.top1, abs=0.005)
    same = carried_over(result, before, manifest, before)
    assert same.steps[0].stop_at == pytest.approx(result.record.steps[0].stop_at, abs=0.01)


def test_the_figures_are_those_of_a_loop_over_the_images_for_judging(manifest, result):
    rows, truth = drawn(2400)
    (first, last), num_right, num_full, cpu_ms, num = result.record.steps, 0, 0, 0.0, 0
    for n, label in enumerate(truth):
        if part_of(Path(f"no/{n}.png")) != "judge":
            continue
        num += 1
        one = {name: own[n : n + 1] for name, own in rows.items()}
        both = average(one, {"dear": 1.0, "cheap": 1.0})
        num_full += both.argmax() == label
        cheap = average({"cheap": one["cheap"]}, {"cheap": 1.0}, first.temperature)
        stops = cheap.max() >= np.float32(first.stop_at)
        num_right += (cheap if stops else both).argmax() == label
        cpu_ms += COSTS["cheap"] + (0 if stops else COSTS["dear"])
    judged = result.record.judged
    assert judged.num_images == num
    assert judged.top1 == pytest.approx(num_right / num, abs=1e-4)
    assert judged.full_top1 == pytest.approx(num_full / num, abs=1e-4)
    assert judged.cpu_ms == pytest.approx(cpu_ms / num, abs=1e-2)
    assert (judged.full_cpu_ms, last.stop_at) == (10.0, None)
    assert judged.lost == pytest.approx((num_full - num_right) / num, abs=1e-4)


def test_each_step_has_a_bound_of_its_own_answers(manifest):
    rows, truth = drawn(4000, hard=0.4)
    record = searched(manifest, rows, truth).record
    for step in record.steps:
        assert step.sure is not None
        assert step.sure.right is None or step.sure.right > 0.9
        assert step.sure.num_images == pytest.approx(record.judged.num_images * step.share, abs=1)
    assert record.answer_set.coverage == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize(
    ("num_images", "costs", "says"),
    [(200, COSTS, "give at least 100 of each"), (1200, {"dear": 1.0, "cheap": 1e6}, None)],
)
def test_too_few_images_or_a_member_that_costs_too_much(manifest, num_images, costs, says):
    rows, truth = drawn(num_images)
    if says is None:
        assert searched(manifest, rows, truth, costs).record.members == ("dear",)
        return
    with pytest.raises(ModelSetError, match=says):
        searched(manifest, rows, truth, costs)


def test_members_that_need_each_other_have_no_plan(manifest):
    """Each knows one half of the images; where it knows nothing it is as sure, and wrong."""
    rng = np.random.default_rng(1)
    truth, images = rng.integers(0, NUM_CLASSES, 1600), np.arange(1600)
    knows, rows = rng.random(1600) < 0.5, {}
    for name, own in (("dear", knows), ("cheap", ~knows)):
        rows[name] = np.zeros((1600, NUM_CLASSES), np.float32)
        rows[name][images, np.where(own, truth, (truth + 1) % NUM_CLASSES)] = 0.6
        rows[name][images, np.where(own, (truth + 2) % NUM_CLASSES, truth)] = 0.4
    with pytest.raises(ModelSetError, match=r"keeps top-1 within 0\.5 points on \d+ images"):
        searched(manifest, rows, truth)


@pytest.mark.parametrize("num_members", [1, 9])
def test_one_member_has_no_plan_nor_have_nine(manifest, num_members):
    members = [manifest.members[0].model_copy(update={"name": f"m{n}"}) for n in range(num_members)]
    other = manifest.model_copy(update={"members": tuple(members)})
    with pytest.raises(ModelSetError, match="searches plans of 2 to 8 members"):
        search(other, Rows(other, "INT8"), "INT8", {}, "", "")


@settings(max_examples=100, deadline=None, database=None)
@given(
    rows=hnp.arrays(np.float32, (3, 7, 4), elements=PROBABILITIES),
    stops=st.tuples(st.sampled_from([0.3, 0.5, 0.7]), st.sampled_from([0.3, 0.5, 0.7])),
    temperatures=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3),
)
def test_rows_by_a_plan_are_those_of_each_image_by_itself(rows, stops, temperatures):
    rows /= rows.sum(axis=2, keepdims=True)
    members, weights = dict(zip("abc", rows, strict=True)), {"a": 1.0, "b": 2.0, "c": 0.5}
    asks = ((("b",), stops[0]), (("a",), stops[1]), (("c",), None))
    plan = plan_of("", asks, temperatures=temperatures)
    answers, at = by_plan(plan, members, weights)
    for image in range(rows.shape[1]):
        for number, names in enumerate(("b", "ba", "bac")):
            some = {name: members[name][image : image + 1] for name in names}
            own = average(some, weights, temperatures[number])
            stop_at = plan.steps[number].stop_at
            if stop_at is None or own.max() >= np.float32(stop_at):
                break
        assert at[image] == number
        np.testing.assert_allclose(answers[image], own[0], rtol=1e-6)


def test_the_command_writes_it_and_serving_knows_it(tmp_path: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=180, side=16)
    before = load_model_set(str(folder)).fingerprint()
    kept, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    done = evaluated(folder, "--images", many, "--plan", "--json", kept, "--plot", plot)
    assert done.exit_code == 0, done.output
    facts = json.loads(kept.read_text("utf-8"))
    manifest = read_manifest(folder)
    assert manifest.usable_plan("INT8") == manifest.fast_plan
    assert manifest.fast_plan.model_dump(mode="json", exclude_none=True) == facts["plan"]
    assert facts["plan"]["judged"]["lost"] == 0
    assert [row["is_chosen"] for row in facts["plans"]].count(True) == 1
    assert "fast: " in done.stdout
    assert "full: sure + unsure" in done.stdout
    assert plot.read_text("utf-8").startswith("<svg")
    assert load_model_set(str(folder)).fingerprint() != before
    assert manifest.made.by == "tandem evaluate --plan"
    again = evaluated(folder, "--images", many, "--plan", "--max-images", 700)
    assert "a sample's result is shown, and not written" in again.stderr
    assert evaluated(folder, "--images", many, "--calibrate").exit_code == 0
    assert read_manifest(folder).fast_plan is None


@cases(
    "options, says",
    (("--plan", "--calibrate"), "--plan: --calibrate fits temperatures and evaluates nothing"),
    (("--plan", "--sure-at", "0.9"), "--plan: --sure-at chooses when an answer is sure"),
    (("--plan", "--url", "http://127.0.0.1:1"), "--url: --plan searches a fast plan"),
    (("--plot", "a.svg"), "--plot draws what --plan compares: give both"),
    (("--plan", "--plot", "a.gif"), "ends in .svg or .png"),
    (("--plan",), "give at least 100 of each"),
)
def test_what_it_does_not_go_with_is_refused(tmp_path: Path, pictures: Path, options, says) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures, *options)
    assert says in str(done.exception)
    assert done.exit_code == 1
    assert read_manifest(folder).fast_plan is None


def test_a_multi_label_set_has_none_and_the_old_option_says_what_to_write(tmp_path, pictures):
    done = evaluated(write_scored_set(tmp_path / "scored"), "--images", pictures, "--plan")
    assert "it searches a fast plan of classes that exclude each other" in str(done.exception)
    done = evaluated(two_precisions(tmp_path / "tiny"), "--images", pictures, "--subsets")
    assert done.exit_code != 0
    assert "--plan" in done.output + str(done.exception)
