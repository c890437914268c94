"""The combiner's arithmetic, what answers list, and what a set's plans may say."""

import math
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calibration.sets.transaction import write_manifest
from models import ensemble
from models.ensemble import (
    AnswerRule,
    AnswerSetRecord,
    AverageRecord,
    PlanRecord,
    SubsetRecord,
    TrustTable,
    average,
    entropy,
    likeliest,
    reaches,
    tempered,
    top_k,
)
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.plans import plan_of, planned, sure_from
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import save_model, tiny_model, write_tiny_set

BOUNDED = settings(max_examples=100, deadline=None, database=None)
POSITIVE = st.floats(0.01, 100.0)
PROBABILITY = st.floats(0, 1, width=32)
LABELS = tuple("abcde")
TWO_SURE = {"a": np.array([[1, 0]], np.float32), "b": np.array([[0, 1]], np.float32)}
TWO = ((("sure",), 0.7), (("unsure",), None))


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@st.composite
def member_rows(draw, max_members: int = 4) -> dict[str, np.ndarray]:
    shape = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    rows = {}
    for index in range(draw(st.integers(1, max_members))):
        raw = draw(arrays(np.float64, shape, elements=st.floats(0.001, 1.0)))
        rows[f"m{index}"] = (raw / raw.sum(1, keepdims=True)).astype(np.float32)
    return rows


@BOUNDED
@given(rows=member_rows(), weights=st.lists(POSITIVE, min_size=4, max_size=4))
def test_rows_still_sum_to_one_and_stay_between_the_members(rows, weights):
    combined = average(rows, {f"m{i}": w for i, w in enumerate(weights)})
    stacked = np.stack(list(rows.values()))
    assert (combined.dtype, combined.shape) == (np.float32, stacked.shape[1:])
    np.testing.assert_allclose(combined.sum(1), 1, atol=1e-5)
    assert (combined <= stacked.max(0) + 1e-6).all()
    assert (combined >= stacked.min(0) - 1e-6).all()


@BOUNDED
@given(rows=member_rows(max_members=2), factor=POSITIVE)
def test_only_the_ratio_of_the_weights_counts(rows, factor):
    weights = {"m0": 1.0, "m1": 3.0}
    scaled = {name: weight * factor for name, weight in weights.items()}
    np.testing.assert_allclose(average(rows, weights), average(rows, scaled), atol=1e-6)


def test_the_average_keeps_the_ratio_of_weights_and_the_top_k_its_order():
    for weights in ({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 1.0, "absent": 96.0}):
        np.testing.assert_allclose(average(TWO_SURE, weights), [[0.75, 0.25]])
    with pytest.raises(ValueError, match="nothing to average"):
        average({}, {"a": 1.0})
    scores = row(0.1, 0.3, 0.1, 0.4, 0.1)
    best = [(p.index, p.label) for p in top_k(scores, LABELS, 4)]
    assert best == [(3, "d"), (1, "b"), (0, "a"), (2, "c")]
    assert all(type(p.probability) is float for p in top_k(scores, LABELS, 5))  # JSON has no numpy


@BOUNDED
@given(row=arrays(np.float32, 5, elements=PROBABILITY), k=st.integers(1, 7))
def test_top_k_of_any_row(row, k):
    best = top_k(row, LABELS, k)
    assert len(best) == min(k, 5)
    keys = [(-p.probability, p.index) for p in best]
    assert keys == sorted(keys)
    left_out = set(range(5)) - {p.index for p in best}
    assert all(row[i] <= best[-1].probability for i in left_out)


@pytest.mark.parametrize("num_classes", [10, 64, 65, 1000])
@pytest.mark.parametrize("k", [1, 5, 10])
def test_the_best_of_few_and_of_many_classes_are_those_of_a_stable_sort(num_classes, k):
    labels = [str(i) for i in range(num_classes)]
    rng = np.random.default_rng(7)
    for distinct in (3, num_classes, 10**6):  # many ties, some, none
        scores = (rng.integers(0, distinct, num_classes) / distinct).astype(np.float32)
        expected = np.argsort(-scores, kind="stable")[:k]
        assert [p.index for p in top_k(scores, labels, k)] == expected.tolist()


@pytest.mark.parametrize("num_classes", [1, 3, 64, 65, 1000])
def test_the_likeliest_is_the_first_of_those_that_tie(num_classes):
    rows = np.random.default_rng(5).integers(0, 5, (50, num_classes)).astype(np.float32)
    best, labels = [likeliest(row) for row in rows], list(map(str, range(num_classes)))
    assert best == rows.argmax(axis=1).tolist()
    assert [top_k(row, labels, 1)[0].index for row in rows] == best


class Sortless(np.ndarray):
    """A row that refuses what gives up the GIL."""

    def argmax(self, *_, **__):
        raise AssertionError("argmax gives up the GIL")


def test_up_to_64_classes_are_compared_without_giving_up_the_gil():
    assert likeliest(np.arange(64, dtype=np.float32).view(Sortless)) == 63
    with pytest.raises(AssertionError, match="argmax"):  # of many it is worth it
        likeliest(np.arange(65, dtype=np.float32).view(Sortless))


@pytest.mark.parametrize("num_classes", [5, 100])
def test_rows_of_nan_have_an_order_all_the_same(num_classes):
    scores = np.full(num_classes, np.nan, np.float32)
    assert len(top_k(scores, [str(i) for i in range(num_classes)], 3)) == 3
    assert 0 <= likeliest(scores) < num_classes


@pytest.mark.parametrize(
    ("scores", "expected"),
    [((1.0, 0.0, 0.0, 0.0), 0), ((0.25,) * 4, 1), ((0.5, 0.5, 0.0, 0.0), 0.5), ((1.0,), 0)],
)
def test_entropy_is_a_share_of_the_largest(scores, expected):
    share = entropy(row(*scores))
    assert share == pytest.approx(expected, abs=1e-6)
    assert type(share) is float


@BOUNDED
@given(row=arrays(np.float32, 6, elements=st.floats(0.125, 1, width=32)))
def test_entropy_of_any_distribution_is_between_none_and_all(row):
    assert -1e-6 <= entropy(row / row.sum()) <= 1 + 1e-6


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_the_entropy_of_few_and_of_many_classes_is_the_same_formula(num_classes):
    scores = np.random.default_rng(3).random(num_classes).astype(np.float32)
    scores[0] = 0
    scores /= scores.sum()
    expected = -np.sum(scores[1:] * np.log(scores[1:])) / np.log(num_classes)
    assert entropy(scores) == pytest.approx(expected, rel=1e-5)


@BOUNDED
@given(rows=member_rows(), temperature=st.floats(0.2, 20))
def test_a_temperature_divides_logits_and_changes_no_order(rows, temperature):
    for row in rows.values():
        exact = np.exp(np.log(row.astype(np.float64)) / temperature)
        cooled = tempered(row, temperature)
        assert cooled.dtype == np.float32
        np.testing.assert_allclose(cooled, exact / exact.sum(1, keepdims=True), atol=1e-5)
        assert (np.take_along_axis(cooled, row.argmax(1)[:, None], 1)[:, 0] == cooled.max(1)).all()


def test_a_temperature_is_that_of_its_average_and_of_one_costs_nothing():
    rows = {"a": np.array([[0.8, 0.2]], np.float32), "b": np.array([[0.4, 0.6]], np.float32)}
    weights = {"a": 1.0, "b": 1.0}
    mean = average(rows, weights)
    assert average(rows, weights, 0.5) == pytest.approx(tempered(mean, 0.5))
    assert average({"a": rows["a"]}, weights, 0.5) == pytest.approx(tempered(rows["a"], 0.5))
    assert tempered(mean, 1.0) is mean


SINGLE, SEVERAL = AnswerRule(LABELS), AnswerRule(LABELS, 0.5)
SCORES = row(0.9, 0.1, 0.95, 0.5, 0.4999)


@cases(
    "rule, scores, k, labels",
    (SINGLE, row(0.1, 0.4, 0.2, 0.3, 0.0), 2, "bd"),
    (SEVERAL, SCORES, 5, "cad"),
    (SEVERAL, SCORES, 2, "ca"),
    (SEVERAL.asked(0.05), SCORES, 5, "cadeb"),
    (SEVERAL.asked(None), SCORES, 5, "cad"),
    (SEVERAL, row(0.1, 0.2, 0.0, 0.3, 0.49), 5, ""),
    # A score that is the threshold is listed, though float32 rounds it.
    *((AnswerRule(LABELS, t), row(t, 0, 0, 0, 0), 5, "a") for t in (0.1, 0.3, 0.7, 0.9)),
)
def test_as_many_as_are_asked_for_or_above_the_threshold_are_listed(rule, scores, k, labels):
    assert [prediction.label for prediction in rule.predictions(scores, k)] == [*labels]


@given(arrays(np.float32, 5, elements=PROBABILITY), st.floats(0.01, 0.99))
def test_the_list_is_what_is_above(scores, threshold):
    listed = AnswerRule(LABELS, threshold).predictions(scores, 5)
    above = np.flatnonzero(ensemble.above(scores, threshold))
    assert {prediction.index for prediction in listed} == set(above)
    assert [p.probability for p in listed] == sorted((p.probability for p in listed), reverse=True)


def test_a_bound_says_what_is_sure_and_what_is_in_the_answer_set():
    assert reaches(row(0.7, 0.3, 0, 0, 0), 0.7) is True  # though float32 rounds it
    assert reaches(row(0.3, 0.699, 0, 0, 0), 0.7) is False
    assert reaches(row(np.nan, 1, 0, 0, 0), 0.7) is False
    assert reaches(row(1, 0, 0, 0, 0), None) is None
    scores = row(0.3, 0.05, 0.4, 0.2, 0.05)
    for bound, expected in ((0.2, "cad"), (0.21, "ca"), (0.9, "c"), (0.0, "cadbe")):
        assert [one.label for one in SINGLE.answer_set(scores, bound)] == list(expected)


def test_members_agree_on_the_likeliest_class_or_on_all_labels():
    first, second = row(0.9, 0.8, 0.1, 0, 0), row(0.8, 0.9, 0.2, 0, 0)
    assert not SINGLE.agree([first, second])
    assert SEVERAL.agree([first, second])
    assert SINGLE.agree([first, row(0.9, 0.1, 0, 0, 0)])
    assert not SEVERAL.agree([first, row(0.9, 0.1, 0, 0, 0)])
    assert SEVERAL.agree([row(0, 0, 0, 0, 0), row(0.4, 0, 0, 0, 0)])  # none, both
    assert SEVERAL.agree([first])


@cases(
    "threshold, scores, expected",
    *((0.5, *case) for case in (((0.5, 0.5), 1.0), ((0, 1), 0.0), ((0.5, 1), 0.5))),
    (0.5, (0.9, 0.9), 0.4689956),
    *((None, *case) for case in (((0.5, 0.5), 1.0), ((0.9, 0.1), 0.4689956))),
)
def test_entropy_is_the_mean_of_each_class_or_of_a_distribution(threshold, scores, expected):
    assert AnswerRule("ab", threshold).entropy(row(*scores)) == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def folder(tmp_path):
    return planned(write_tiny_set(tmp_path / "tiny"), *TWO)


def changed(folder, change) -> None:
    """Change the plan in a set's manifest.yaml, as a person might."""
    content = read_manifest(folder).model_dump(mode="json", exclude_none=True)
    change(content["fast_plan"])
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content))


@cases(
    "change, says",
    (lambda p: p["steps"][0].update(ask=["nobody"]), "fast_plan names 'nobody', no member of"),
    (lambda p: p["steps"][0].update(stop_at=1.5), "less than or equal to 1"),
    (lambda p: p["steps"][0].update(stop_at=-0.1), "greater than or equal to 0"),
    (lambda p: p["steps"][0].update(stop_at=math.nan), "finite number"),
    (lambda p: p["steps"][0].pop("stop_at"), "every step of a plan but the last has stop_at"),
    (lambda p: p["steps"][1].update(stop_at=0.5), "the last has none"),
    (lambda p: p["steps"][1].update(ask=["sure"]), "asks each member once, not sure, sure"),
    (lambda p: p["steps"][1].update(ask=[]), "at least 1 item"),
    (lambda p: p.update(steps=[]), "at least 1 item"),
    (lambda p: p.update(steps=[p["steps"][0]] * 3 + [p["steps"][1]]), "at most 3 items"),
    (lambda p: p["steps"][0].update(temperature=0.1), "greater than or equal to 0.2"),
)
def test_what_a_manifest_refuses(folder, change, says):
    changed(folder, change)
    with pytest.raises(ModelSetError) as raised:
        read_manifest(folder)
    assert says in raised.value.message


def test_a_plan_is_of_the_networks_weights_and_temperatures_that_it_was_made_for(folder):
    manifest = read_manifest(folder)
    assert manifest.usable_plan("INT8") == manifest.fast_plan
    assert manifest.plan_problem("INT8") is None
    first, *others = manifest.members
    network = save_model(tiny_model(gain=3.0), folder, "other")
    made = "was made for other networks, weights or temperatures; tandem evaluate tiny --images DIR"
    for update in ({"networks": {"INT8": network}}, {"weight": 2.0}, {"temperature": 1.5}):
        members = (first.model_copy(update=update), *others)
        other = manifest.model_copy(update={"members": members})
        assert made in (other.plan_problem("INT8") or "")
        assert other.usable_plan("INT8") is None
    assert manifest.model_copy(update={"fast_plan": None}).plan_problem("INT8", "~/tiny") == (
        "tiny has no fast plan; tandem evaluate ~/tiny --images DIR --plan makes one"
    )
    assert "is of INT8, not of FP16" in (manifest.plan_problem("FP16") or "")


def test_a_multi_label_set_has_no_plan(tmp_path):
    manifest = read_manifest(write_scored_set(tmp_path / "scored"))
    assert "classes that exclude each other" in (manifest.plan_problem("INT8") or "")
    held = AnswerSetRecord(probability=0.1, target=0.95, num_images=9, coverage=0.9, mean_size=1)
    (name, *_) = manifest.weights
    values: dict[str, Any] = {
        "sure": sure_from(0.5),
        "answer_set": held,
        "trust": (SubsetRecord(members=(name,)),),
        "fast_plan": plan_of(manifest.plan_key("INT8"), (((name,), None),)),
    }
    for what, value in values.items():
        with pytest.raises(ValueError, match=f"{what} is of classes that exclude each other"):
            type(manifest).model_validate(manifest.model_dump() | {what: value})


def test_a_plan_is_part_of_the_version_and_goes_with_other_weights(folder, tmp_path):
    plain = load_model_set(str(write_tiny_set(tmp_path / "plain" / "tiny")))
    model_set = load_model_set(str(folder))
    assert model_set.fingerprint() != plain.fingerprint()
    before = model_set.fingerprint()
    planned(folder, (("sure",), 0.71), (("unsure",), None))
    assert load_model_set(str(folder)).fingerprint() != before
    assert model_set.weighted({"sure": 1.0}).manifest.fast_plan is None


def test_each_average_has_its_own_trust():
    plan = plan_of("", ((("b",), 0.7), (("a", "c"), None)), bounds=(0.8, None))
    whole = AverageRecord(temperature=0.5, sure=sure_from(0.9))
    subset = SubsetRecord(members=("a",), temperature=2.0, sure=sure_from(0.6))
    table = TrustTable("set", ("a", "b", "c"), whole, (subset,), plan)

    def trust(names: str, step: int | None = None) -> tuple[float, float | None]:
        found = table.of(dict.fromkeys(names), step)
        return found.temperature, found.sure_from

    assert trust("abc") == (0.5, 0.9)
    assert trust("b", 0) == (1.0, 0.8)
    assert trust("bac", 1) == (1.0, None)
    assert trust("a") == (2.0, 0.6)
    assert trust("b") == trust("ba", 1) == (1.0, None)  # nothing was measured for these
    assert table.of(dict.fromkeys("bc")).no_bound == "set has no measured bound for b and c alone"
    assert table.of(dict.fromkeys("bac"), 1).no_bound is not None
    plain = TrustTable("set", ("a", "b"), AverageRecord())
    assert (plain.of({"a": 1}).no_bound, plain.of({"a": 1, "b": 1}).no_bound) == (None, None)


def test_a_plan_says_who_is_asked_and_is_kept_as_written(folder):
    plan = plan_of("", ((("b",), 0.7), (("a",), 0.7), (("c",), None)))
    assert plan.shares == pytest.approx({"b": 1.0, "a": 2 / 3, "c": 1 / 3})
    assert [plan.step_of(n) for n in range(5)] == [None, 0, 1, 2, None]
    assert plan.members == ("b", "a", "c")
    manifest = read_manifest(folder)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    plan = manifest.fast_plan
    assert PlanRecord.model_validate(plan.model_dump(mode="json")) == plan
