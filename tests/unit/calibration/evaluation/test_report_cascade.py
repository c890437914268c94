"""The cascade in the reports: the table, the line that sets it, what flatters, the plot."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from app.settings import Settings
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.report_subsets import show_cascade
from models.ensemble import average
from models.manifest import ENSEMBLE
from models.model_set import ModelSet
from tests.support.calibration.made_evaluations import (
    HOSTILE,
    content_of,
    images_of,
    live_result,
    measure,
    model_set_of,
    rows_of,
)
from tests.support.calibration.report_output import Page, page_of, shown


@pytest.fixture
def both(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set")


@pytest.fixture
def hostile(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set", HOSTILE)


NUM_SURE, NUM_UNSURE = 80, 20


@pytest.fixture
def measured(both: ModelSet) -> Evaluation:
    """100 images more: of 20 the first member is unsure and wrong, the second sure and right."""
    found = measure(both, truth=(0,), answer=(0,))
    truth = np.zeros(NUM_SURE + NUM_UNSURE, np.int64)
    first = np.concatenate([rows_of((0,) * NUM_SURE, 3, 0.9), rows_of((1,) * NUM_UNSURE, 3, 0.4)])
    rows = {"sure": first, "unsure": rows_of(tuple(truth), 3, 0.8)}
    rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
    found.add(AnsweredBatch(images_of(truth), [], {"INT8": rows}, []))
    found.cpu_ms_per_image = {"sure": {"INT8": 4.0}, "unsure": {"INT8": 6.0}}
    for by_precision in (found.tallies, found.cascades, found.over_members, found.num_agreed):
        by_precision.pop("FP16", None)
    found.drops = {}
    return found


def test_the_line_is_one_that_the_application_takes(both, measured):
    line = content_of(both, measured)["cascade"]["INT8"]["setting"]
    says = "# top-1 100.0 % against 100.0 %, 80 % of images skip unsure, 5.2 instead of 10.0 CPU-ms"
    assert line.endswith(says)
    margin = Settings.model_validate(yaml.safe_load(line)).cascade_margin
    assert margin is not None
    assert 0.1 <= margin <= 0.85
    assert f"  {line}\n" in shown(both, measured)


def test_the_table_goes_from_never_to_always(both, measured):
    text = shown(both, measured, width=80)
    rows = [[cell.strip() for cell in li.split("│")[1:-1]] for li in text.splitlines() if "│" in li]
    rows = rows[[row[0] for row in rows].index("null (never skip)") :]
    assert [row[0].split()[-1] for row in rows] == ["skip)", "0.1)", "skip", "alone"]
    assert [row[1] for row in rows] == ["1.0000", "1.0000", "0.8020", "1.0000"]
    assert [row[-1] for row in rows] == ["10.0", "5.2", "4.0", "6.0"]
    assert rows[2][2].startswith("+19.80 (+13.20 to ")


def test_what_flatters_is_said_everywhere(tmp_path, both, measured):
    told = content_of(both, measured)["cascade"]["INT8"]["note"]
    assert "chosen on these same images" in told
    assert told in shown(both, measured)
    assert told in Page(page_of(tmp_path, both, measured)).text


@pytest.mark.parametrize(("cpu_ms", "is_told"), [(4.5, False), (4.0, True)])
def test_a_member_that_should_go_first_is_told(tmp_path, both, measured, cpu_ms, is_told):
    measured.cpu_ms_per_image["unsure"]["INT8"] = cpu_ms
    says = "unsure alone is better than sure for no more CPU time"
    assert (says in shown(both, measured)) == is_told
    assert (says in Page(page_of(tmp_path, both, measured)).text) == is_told
    told = content_of(both, measured)["cascade"]["INT8"]["better_first"]
    assert told == (["unsure"] if is_told else [])


def test_nothing_is_suggested_where_every_skipped_image_costs(both):
    found = measure(both, truth=(0,), answer=(0,))
    found.cascades.clear()
    rows = {"sure": rows_of((1,), 3, 0.99), "unsure": rows_of((0,), 3, 1.0)}
    rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
    found.add(AnsweredBatch(images_of([0]), [], {"INT8": rows}, []))
    line = content_of(both, found)["cascade"]["INT8"]["setting"]
    assert yaml.safe_load(line) == {"cascade_margin": None}
    assert "no threshold within 0.5 points of the ensemble skips anything" in line


def test_the_json_has_the_points_and_the_page_draws_them(tmp_path, both, measured):
    cascade = json.loads(json.dumps(content_of(both, measured)))["cascade"]["INT8"]
    assert (cascade["first"], cascade["skipped"]) == ("sure", ["unsure"])
    never, *between, always = cascade["points"]
    assert (never["cascade_margin"], never["share_skipped"]) == (None, 0)
    assert (always["cascade_margin"], always["share_skipped"]) == (0, 1)
    assert len(between) >= 9
    assert always["lost"] == pytest.approx(20 / 101, abs=1e-4)
    page = Page(page_of(tmp_path, both, measured))
    assert {"sure alone", "unsure alone", "cascade, by threshold"} <= set(page.drawn)
    assert {"never skip", "always skip", cascade["setting"]} <= set(page.texts)


def test_float_networks_have_one_too(tmp_path):
    model_set = model_set_of(tmp_path / "set", precisions=("FP16",))
    assert "cascade, float: unsure asked only where sure is unsure" in shown(
        model_set, measure(model_set)
    )


def test_a_single_member_has_no_cascade(tmp_path):
    model_set = model_set_of(tmp_path / "set", members=("only",), precisions=("INT8",))
    measured = measure(model_set)
    assert "cascade" not in content_of(model_set, measured)
    assert "cascade" not in shown(model_set, measured)
    assert "Cascade" not in Page(page_of(tmp_path, model_set, measured)).text
    show_cascade(Console(), measured)  # says nothing


def test_members_that_a_live_cascade_skipped_have_no_top1(both):
    live = live_result(num_right={ENSEMBLE: 7, "sure": 7, "unsure": 2}, num_alone=6, num_partial=6)
    text = shown(both, measure(both), live)
    assert "top-1 ensemble 0.7000\n" in text
    assert "its cascade skipped members on 60.0% of images" in text
