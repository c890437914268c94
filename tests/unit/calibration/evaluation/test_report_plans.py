"""A search of plans and the modes of a set, as tables, JSON and a plot."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from calibration.evaluation.plans import MAX_LOST, PlanScore, PlanSearch, Step
from calibration.evaluation.report_page import write_plot
from calibration.evaluation.report_plans import plans_json, show_modes, show_plans, verdict
from calibration.statistics import ModeTally
from tests.support.plans import FIGURES, plan_of


def score(lost: float, low: float, high: float, *members: str) -> PlanScore:
    figures = FIGURES.model_copy(update={"lost": lost, "lost_interval": (low, high)})
    first, *others = members
    steps = [Step((first,), (first,), 1.0, 0.7 if others else None)]
    steps += [Step((name,), (first, name), 1.0, None) for name in others]
    shares = (0.75, 0.25) if others else (1.0,)
    return PlanScore(tuple(steps), FIGURES, figures, shares)


def search_of(best: PlanScore, *others: PlanScore) -> PlanSearch:
    plan = plan_of("key", ((("cheap",), 0.7), (("dear",), None)))
    record = plan.model_copy(update={"judged": best.judged})
    return PlanSearch("INT8", {"dear": 9.0, "cheap": 1.0}, (best, *others), best, record)


def printed(show, *arguments, width: int = 80) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False), *arguments)
    return out.getvalue()


@pytest.mark.parametrize(
    ("lost", "low", "high", "says"),
    [
        (-0.001, -0.006, 0.004, "its loss is within 0.5 points"),
        (0.02, 0.011, 0.03, "it loses more than 0.5 points, and that is no chance"),
        (0.001, -0.019, 0.021, "is not known: about 2,400 more images would tell"),
        (MAX_LOST, -0.02, 0.03, "is not known: many more images would tell"),
    ],
)
def test_the_verdict_in_words(lost, low, high, says):
    assert verdict(search_of(score(lost, low, high, "cheap", "dear"))).endswith(says)


def test_the_table_has_all_members_and_every_plan_in_80_columns():
    best = score(0.001, -0.002, 0.004, "cheap", "dear")
    text = printed(show_plans, search_of(best, score(0.03, 0.02, 0.04, "cheap")))
    flat = " ".join(text.replace("│", " ").split())
    for words in (
        "full: dear +",
        "cheap, then dear",
        "below 0.700",
        "75%",
        "25%",
        "+0.10",
        "+3.00",
    ):
        assert words in flat
    assert "fast: cheap, then dear below 0.700; its loss is within 0.5 points" in text
    assert max(map(len, text.split("fast: ")[0].splitlines())) <= 80


def test_json_has_the_plan_and_what_each_costs_and_loses():
    best, other = score(0.001, -0.002, 0.004, "cheap", "dear"), score(0.03, 0.02, 0.04, "cheap")
    content = json.loads(json.dumps(plans_json(search_of(best, other)), allow_nan=False))
    assert [plan["is_chosen"] for plan in content["plans"]] == [True, False]
    assert [plan["answered_at_step"] for plan in content["plans"]] == [[0.75, 0.25], [1.0]]
    assert content["plan"]["steps"][0]["ask"] == ["cheap"]
    assert (content["outcome"], content["plans"][0]["times_cheaper"]) == ("verified", 2.0)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot_names_the_choice(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plans{suffix}"
    write_plot(path, search_of(score(0.001, -0.002, 0.004, "cheap", "dear")))
    content = path.read_bytes()
    assert content.startswith(b"<svg" if suffix == ".svg" else b"\x89PNG")
    if suffix == ".svg":
        assert b"cheap, then dear below 0.700" in content


def test_modes_say_how_many_are_sure_and_how_many_of_these_right():
    rows = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.1, 0.9]], np.float32)
    full, alone, none = ModeTally(0.7, 0.3), ModeTally(0.99, None), ModeTally(None, None)
    for tally in (full, alone, none):
        tally.add(rows, np.array([0, 0, 1, 0]))
    text = printed(show_modes, "INT8", {"full": full, "a [b] alone": alone, "c": none})
    assert "answers of INT8, on 4 images that fitted and chose nothing" in text
    flat = " ".join(text.replace("│", " ").split())
    assert "full 4 0.7500 0.700 75.0% 66.7%" in flat
    assert "a [b] alone 4 0.7500 0.990 0.0%" in flat
    assert "float" in printed(show_modes, "FP16", {"full": full})


def test_a_score_names_its_steps():
    assert score(0, 0, 0, "a").name == "a"
    both = score(0, 0, 0, "a", "b")
    assert both.name == "a, then b below 0.700"
    assert replace(both, steps=both.steps[:1]).name == "a"
