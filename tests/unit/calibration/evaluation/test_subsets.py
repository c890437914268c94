"""The compared ensembles: the front, the choice, weights and figures, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app.settings import Settings
from calibration.evaluation.subsets import (
    PREFERENCE,
    SubsetScore,
    cheapest_as_good,
    fit_logistic,
    is_for_fitting,
    log_rows,
    measure_costs,
    pareto_front,
    split,
    subsets_of,
)
from calibration.statistics import Paired
from configs.functions.geometric_mean import geometric_mean
from models.ensemble import average
from models.errors import ModelSetError
from models.manifest import wilson_interval
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.calibration.made_subsets import COSTS, NAMES, Drawn, compared, study_of
from tests.support.runtime_files import write_mixed_set
from tests.support.tiny_networks import write_tiny_set

BOUNDED = settings(max_examples=200, deadline=None, database=None)
FEW = st.integers(0, 3)
BEHIND = [
    (0, 0),
    (1, 0),
    (5, 0),
    (6, 0),
    (40, 30),
    (40, 10),
]  # whom the best, and it, alone has right


@st.composite
def scored(draw) -> SubsetScore:
    return SubsetScore(
        members=("a",),
        weights={"a": 1.0},
        method=draw(st.sampled_from(PREFERENCE)),
        margin=draw(st.sampled_from([None, 0.5])),
        top1=draw(FEW) / 4,
        top1_interval=(0.0, 1.0),
        nats=None,
        lost=Paired(),
        behind=Paired(400, *draw(st.sampled_from(BEHIND))),
        cpu_ms=float(draw(FEW)),
        memory_mb=float(draw(FEW)),
    )


def cost(score: SubsetScore) -> tuple[float, float, float]:
    return -score.top1, score.cpu_ms, score.memory_mb


@BOUNDED
@given(scores=st.lists(scored(), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(scores):
    def is_beaten(score: SubsetScore) -> bool:
        return any(
            cost(other) != cost(score)
            and all(a <= b for a, b in zip(cost(other), cost(score), strict=True))
            for other in scores
        )

    front = pareto_front(scores)
    assert {cost(s) for s in front} == {cost(s) for s in scores if not is_beaten(s)}
    assert len({cost(s) for s in front}) == len(front)  # one of equals
    assert [s.cpu_ms for s in front] == sorted(s.cpu_ms for s in front)


@BOUNDED
@given(scores=st.lists(scored(), min_size=1, max_size=12))
def test_the_choice_is_the_cheapest_that_chance_may_have_put_behind(scores):
    best = replace(scores[0], behind=Paired(400))
    chosen = cheapest_as_good([best, *scores])
    alike = [s for s in scores if (s.behind.only_first, s.behind.only_second) in BEHIND[:3]]
    alike += [s for s in scores if (s.behind.only_first, s.behind.only_second) == (40, 30)]
    assert chosen.cpu_ms == min(score.cpu_ms for score in [best, *alike])


DRAWN = Drawn()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("set"), DRAWN)


def judged() -> list[int]:
    return DRAWN.places(split(DRAWN.images)[1])


def test_every_subset_is_there_in_every_way(result):
    found = {(score.members, score.method) for score in result.scores if score.margin is None}
    several = [chosen for chosen in subsets_of(NAMES) if len(chosen) > 1]
    assert len(subsets_of(NAMES)) == 7
    assert found == {(chosen, "average") for chosen in subsets_of(NAMES)} | {
        (chosen, "logistic") for chosen in several
    }


def test_accuracy_is_that_of_the_images_that_no_weight_was_fitted_to(result):
    places = judged()
    truth = DRAWN.truth[places]
    assert (result.num_fitted, result.num_judged) == (400 - len(places), len(places))
    reference = average({n: r[places] for n, r in DRAWN.rows.items()}, dict.fromkeys(NAMES, 1.0))
    best = max(score.top1 for score in result.scores)
    assert min(score.behind.difference for score in result.scores) == 0
    for score in (s for s in result.scores if s.margin is None):
        rows = {name: DRAWN.rows[name][places] for name in score.members}
        combine = geometric_mean if score.method == "logistic" else average
        total = sum(score.weights.values())
        shares = {name: weight / total for name, weight in score.weights.items()}
        right = combine(rows, shares).argmax(axis=1) == truth
        assert score.top1 == pytest.approx(right.mean()), score.name
        assert score.top1_interval == wilson_interval(int(right.sum()), len(places))
        assert score.lost == Paired.of(reference.argmax(axis=1) == truth, right)
        assert score.behind.difference == pytest.approx(best - right.mean())
        assert score.cpu_ms == sum(COSTS[name].cpu_ms for name in score.members)
        assert score.memory_mb == sum(COSTS[name].memory_mb for name in score.members)


def test_fitted_weights_are_likelier_and_follow_the_members(result):
    by = {(score.members, score.method): score for score in result.scores if score.margin is None}
    whole = by[NAMES, "logistic"]
    assert whole.weights["good"] > whole.weights["fair"] > whole.weights["poor"] >= 0
    assert whole.nats > by[NAMES, "average"].nats
    assert sum(whole.weights.values()) > 1.5  # independent members: surer together


def test_how_the_images_are_cut_into_batches_changes_nothing(tmp_path, result):
    for size in (1, 8, 400):
        again = compared(tmp_path / str(size), DRAWN, size=size)
        names = [(score.name, score.top1) for score in again.scores]
        assert names == [(score.name, score.top1) for score in result.scores]


def test_rows_are_kept_up_to_a_limit(tmp_path, monkeypatch, result):
    monkeypatch.setattr("calibration.evaluation.subsets.MAX_KEPT_VALUES", 7 * 3 * 4 * 9)
    limited = compared(tmp_path, DRAWN)
    pairs = zip(limited.scores, result.scores, strict=True)
    changed = {few.method for few, every in pairs if few.weights != every.weights}
    assert changed == {"logistic"}  # fitted to fewer; the others to all


def test_averages_have_the_manifests_weights(tmp_path):
    weights = {"good": 3.0, "fair": 1.0, "poor": 1.0}
    compared_sets = compared(tmp_path, DRAWN, weights=weights)
    plain = [s for s in compared_sets.scores if s.margin is None]
    averages = {s.members: s for s in plain if s.method == "average"}
    assert averages[NAMES].weights == {"good": 0.6, "fair": 0.2, "poor": 0.2}
    assert averages[NAMES].lost.difference == 0
    assert averages["good", "poor"].weights == {"good": 0.75, "poor": 0.25}


def test_the_cascade_is_of_the_same_images(result):
    points = [score for score in result.scores if score.margin is not None]
    assert points
    assert all(0 < point.margin < 1 for point in points)
    assert {point.lost.num_images for point in points} == {result.num_judged}
    best = max(score.top1 for score in result.scores)
    for point in points:
        assert point.behind.difference == pytest.approx(best - point.top1)
    cheap = points[0]
    assert COSTS["good"].cpu_ms <= cheap.cpu_ms < sum(c.cpu_ms for c in COSTS.values())


def test_the_split_is_by_the_files_bytes(tmp_path):
    sides = []
    for number in range(64):
        first, second = tmp_path / f"a{number}", tmp_path / f"{number}b"
        for path in (first, second):
            path.write_text(str(number))
        assert is_for_fitting(first) == is_for_fitting(second)
        sides.append(is_for_fitting(first))
    assert 16 < sum(sides) < 48


def test_too_few_images_for_two_halves(tmp_path):
    study = study_of(tmp_path)
    with pytest.raises(ModelSetError, match="1 are too few; give more"):
        study.ordered(DRAWN.images[:1])


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_that_cannot_be_read(tmp_path, half):
    study = study_of(tmp_path)
    study.ordered(DRAWN.images)
    study.add(DRAWN.batch(split(DRAWN.images)[half]))
    study.add(replace(DRAWN.batch([]), probabilities={}))
    with pytest.raises(ModelSetError, match="of one of them none can be read"):
        study.result()


@pytest.mark.parametrize("number", [1, 9])
def test_one_member_or_too_many(number):
    names = [f"m{i}" for i in range(number)]
    with pytest.raises(ModelSetError, match=f"2 to 8 members; this set has {number} "):
        subsets_of(names)


def test_the_logistic_fit_is_at_the_maximum():
    rows = np.stack([DRAWN.rows[name] for name in NAMES])
    weights = fit_logistic(rows, DRAWN.truth)

    def likelihood(weights: np.ndarray) -> float:
        scores = np.tensordot(weights, log_rows(rows).astype(np.float64), 1)
        of_truth = scores[np.arange(len(scores)), DRAWN.truth]
        return float((of_truth - np.log(np.exp(scores).sum(axis=1))).mean())

    best = likelihood(weights)
    for member in range(len(NAMES)):
        for step in (-0.05, 0.05):
            near = weights.copy()
            near[member] = max(0.0, near[member] + step)
            assert likelihood(near) <= best + 1e-6


def test_members_that_know_nothing_have_a_weight_all_the_same():
    rows = np.full((2, 5, 3), 1 / 3, np.float32)
    assert fit_logistic(rows, np.zeros(5, np.int64)).sum() > 0


def test_the_command(tmp_path, pictures):
    folder = write_tiny_set(tmp_path / "set")
    out, plot, page = (tmp_path / name for name in ("out.json", "plot.svg", "page.html"))
    result = evaluated(
        folder, "--images", pictures, "--subsets", "--plot", plot, "--json", out, "--html", page
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["subsets"]
    assert found["num_fitted"] + found["num_judged"] == 21
    assert {e["name"] for e in found["ensembles"] if e["cascade_margin"] is None} == {
        "sure",
        "unsure",
        "sure + unsure, average",
        "sure + unsure, logistic",
    }
    assert all(e["top1"] == 1 for e in found["ensembles"])
    assert all(member["cpu_ms_per_image"] > 0 for member in found["members"].values())
    lines = found["suggested"]["setting"]  # one member does: both are always right
    weights = Settings.model_validate(yaml.safe_load("\n".join(lines))).weights
    assert weights is not None
    (name,) = weights
    assert found["suggested"]["name"] == name
    block = found["suggested"]["block"]
    assert block in result.stdout
    settings = Settings.model_validate(yaml.safe_load(block)["args"])
    assert settings.load_set().folder == folder.resolve()
    assert plot.read_text().startswith("<svg")
    assert "Which ensemble is worth it" in page.read_text()


def test_the_precision_that_is_served_is_compared(tmp_path, pictures):
    folder = two_precisions(tmp_path / "set")
    out = tmp_path / "out.json"
    result = evaluated(folder, "--images", pictures, "--subsets", "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["subsets"]["precision"] == "INT8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plot", "plot.svg"], "--plot draws what --subsets compares: give both"),
        (["--subsets", "--plot", "plot.pdf"], "ends in .svg or .png"),
        (
            ["--subsets", "--plot", "nowhere/plot.svg"],
            "in a folder that can be written",
        ),
        (["--html", "-"], "--html - is no file; name one"),
        (["--subsets", "--plot", "-"], "--plot - is no file; name one"),
        (["--subsets", "--max-images", "1"], "1 are too few; give more"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, pictures, options, says):
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_set(tmp_path / "set")
    before = (folder / "manifest.yaml").read_text()
    result = evaluated(folder, "--images", pictures, *options)
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert (folder / "manifest.yaml").read_text() == before


def test_members_of_another_runtime(tmp_path, pictures):
    folder = write_mixed_set(tmp_path / "set", runtimes=("openvino", "onnxruntime"))
    out = tmp_path / "out.json"
    result = evaluated(folder, "--images", pictures, "--subsets", "--json", out)
    assert result.exit_code == 0, result.exception
    members = json.loads(out.read_text())["subsets"]["members"]
    assert set(members) == {"openvino", "onnxruntime"}
    assert all(member["cpu_ms_per_image"] > 0 for member in members.values())


def test_one_member_has_no_subsets(tmp_path, pictures):
    folder = write_tiny_set(tmp_path / "set", gains={"only": 4.0})
    result = evaluated(folder, "--images", pictures, "--subsets")
    assert result.exit_code != 0
    assert "2 to 8 members; this set has 1 (only)" in str(result.exception)


def test_a_member_that_works_more_costs_more(tmp_path):
    light = write_tiny_set(tmp_path / "light", gains={"a": 4.0}, size=64)
    heavy = write_tiny_set(tmp_path / "heavy", gains={"a": 4.0}, size=64, num_convolutions=4)
    costs = [measure_costs(load_model_set(str(f)), "INT8")["a"] for f in (light, heavy)]
    assert costs[1].cpu_ms > 2 * costs[0].cpu_ms
    assert costs[1].memory_mb >= 0
