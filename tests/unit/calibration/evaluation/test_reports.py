"""One evaluation as JSON, tables and a page: the same figures, whatever was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibration.evaluation.inference import AnsweredBatch
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


def test_the_json_has_what_was_counted(both):
    measured = measure(both, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0))
    measured.unreadable = ["a.png: no image"]
    content = content_of(both, measured, live_result())
    assert json.loads(json.dumps(content, allow_nan=False)) == json.loads(json.dumps(content))
    assert (content["set"], content["dataset"], content["num_images"]) == (
        "tiny",
        "colours/eval",
        10,
    )
    assert content["scores"]["INT8"][ENSEMBLE]["top1"] == 0.7
    assert content["scores"]["FP16"]["sure"]["top1"] == 0.9
    assert content["drops"]["sure"]["top1"] == 0.2
    assert content["drops"]["sure"]["p_value"] == 0.5
    assert content["agreement"] == {"FP16": 1.0, "INT8": 1.0}
    over = content["ensemble_over_members"]["INT8"]
    assert set(over) == {"sure", "unsure"}
    assert (over["sure"]["difference"], over["sure"]["p_value"]) == (0.0, 1.0)
    assert content["unreadable"] == ["a.png: no image"]
    assert content["live"]["is_same"] is True


def test_members_that_disagree_are_counted(tmp_path):
    model_set = model_set_of(tmp_path / "set", precisions=("INT8",))
    measured = measure(model_set)
    answers = {"sure": rows_of((0, 1), 3, 0.9), "unsure": rows_of((0, 2), 3, 0.6)}
    answers[ENSEMBLE] = average(answers, dict.fromkeys(answers, 1.0))
    measured.add(AnsweredBatch(images_of([0, 1]), [], {"INT8": answers}, []))
    content = content_of(model_set, measured)
    over = content["ensemble_over_members"]["INT8"]
    assert over["unsure"]["difference"] == round(1 / 12, 4)
    assert over["unsure"]["interval"][0] < 0 < over["unsure"]["interval"][1]
    assert content["agreement"] == {"INT8": round(11 / 12, 4)}


@pytest.mark.parametrize(
    ("precision", "members"), [("INT8", ("only",)), ("FP16", ("sure", "unsure"))]
)
def test_a_set_of_one_precision_has_no_drops(tmp_path, precision, members):
    model_set = model_set_of(tmp_path / "set", members=members, precisions=(precision,))
    measured = measure(model_set)
    content = content_of(model_set, measured)
    assert json.loads(json.dumps(content, allow_nan=False))["drops"] == {}
    assert set(content["scores"]) == {precision}
    assert "live" not in content
    tables = shown(model_set, measured)
    assert "McNemar" not in tables
    assert ("f32" in tables) == (precision == "FP16")
    page = Page(page_of(tmp_path, model_set, measured))
    assert "What INT8 costs" not in page.text
    assert ("float (f32)" in page.texts) == (precision == "FP16")
    assert page.tags.count("svg") == 3 + (len(members) > 1)
    assert {*members, ENSEMBLE} <= set(page.drawn)


def test_one_image_is_enough_for_every_report(tmp_path, both):
    measured = measure(both, truth=(1,), answer=(0,))
    json.dumps(content_of(both, measured), allow_nan=False)
    assert "0.0000" in shown(both, measured)
    assert Page(page_of(tmp_path, both, measured)).tags.count("svg") == 4


def test_an_ensemble_that_some_members_lack_is_not_reported(tmp_path, both):
    """One member was never quantised: INT8 has scores of the other alone."""
    measured = measure(both)
    parts: list[Any] = [measured.tallies["INT8"], measured.cpu_ms_per_image["unsure"]]
    for of_int8 in parts:
        for gone in ("unsure", ENSEMBLE, "INT8"):
            of_int8.pop(gone, None)
    del measured.over_members["INT8"], measured.cascades["INT8"]
    json.dumps(content_of(both, measured), allow_nan=False)
    assert shown(both, measured).count("INT8") >= 1
    page = Page(page_of(tmp_path, both, measured))
    assert page.tags.count("svg") == 3
    assert "sure" in page.drawn
    assert "unsure" not in page.drawn
