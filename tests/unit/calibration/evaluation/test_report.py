"""An evaluation as JSON and tables: every figure in its place, names and notes are no markup."""

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.record import record_of
from calibration.evaluation.report import as_json, show
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


def test_the_tables_have_every_classifier_and_precision(both):
    lines = shown(both, measure(both)).splitlines()
    rows = [re.findall(r"[^│┃\s]+", line)[:3] for line in lines if re.match(r"│ \w", line)]
    assert rows[:6] == [
        ["sure", "f32", "0.7000"],
        ["sure", "INT8", "0.7000"],
        ["unsure", "f32", "0.7000"],
        ["unsure", "INT8", "0.7000"],
        ["ensemble", "f32", "0.7000"],
        ["ensemble", "INT8", "0.7000"],
    ]


def test_the_ensemble_costs_what_its_members_cost_together(both):
    (row,) = re.findall("│ ensemble │ INT8 .*│", shown(both, measure(both)))
    assert row.rstrip("│ ").endswith("2.5")


@pytest.mark.parametrize(
    ("times", "max_drop", "says"),
    [
        (1, 0.1, "not known"),  # 2 of 10 images
        (100, 0.1, "refused: over +10.00"),
        (100, 0.25, "verified"),
    ],
)
def test_what_the_gate_makes_of_a_drop_is_told(both, times, max_drop, says):
    manifest = both.manifest.model_copy(update={"max_drop": max_drop})
    model_set = ModelSet(both.folder, manifest)
    measured = measure(
        both,
        truth=(0, 0, 1, 1, 1, 2, 2, 2, 2, 2) * times,
        answer=(0, 1, 1, 1, 0, 2, 2, 2, 2, 0) * times,
        float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0) * times,
    )
    rows = [line for line in shown(model_set, measured).splitlines() if "+20.00 " in line]
    assert len(rows) == 3
    assert all(says in row for row in rows)
    gate = as_json(manifest, record_of(both, measured), measured, None)["gate"]
    outcome = says.split(":")[0].replace("not known", "unknown")
    assert gate == dict.fromkeys(("ensemble", "sure", "unsure"), outcome)


def test_a_long_member_name_leaves_the_figures_their_room(tmp_path):
    name = "convnext_" + "x" * 54
    model_set = model_set_of(tmp_path / "set", members=(name,), precisions=("INT8",))
    text = shown(model_set, measure(model_set), width=80)
    assert "…" not in text.split("95 %:")[0]
    (row,) = [line for line in text.splitlines() if "convnext_" in line and "│" in line]
    assert {"INT8", "0.7000", "0.397-0.892", "1.0000"} <= set(row.split())


def test_brackets_in_names_and_notes_are_no_markup(hostile):
    note = f"no images of 2 classes: {HOSTILE[3]}, [/]"
    measured = measure(hostile, name="[bold]/x[/]", notes=(note,))
    measured.unreadable = ["[red]/a[/].png: no image"]
    live = live_result(num_same=9, differences=["[red]/b[/].png: probability"])
    text = shown(hostile, measured, live)
    assert "[bold]/x[/], 10 images" in text
    assert note in text
    assert "  [red]/a[/].png: no image\n" in text
    assert "  [red]/b[/].png: probability\n" in text
    assert "live, http://[::1]:8000: top-1 ensemble 0.7000" in text
    assert "9 of 10 images answered as in process" in text


def test_of_many_unreadable_images_some_are_shown(both):
    measured = measure(both)
    measured.unreadable = [f"{i}.png: no image" for i in range(12)]
    text = shown(both, measured)
    assert "12 images cannot be read" in text
    assert "  9.png: no image\n  ... (--json has all)" in text
    assert "10.png" not in text


def test_a_path_that_is_not_utf8_can_be_shown_and_written(tmp_path, both):
    measured = measure(both)
    measured.unreadable = ["a\udcff.png: no image"]
    live = live_result(num_same=9, differences=["b\udcff.png: other"])
    out = io.BytesIO()
    console = Console(file=io.TextIOWrapper(out, "utf-8", write_through=True), width=200)
    show(console, both.manifest, record_of(both, measured), measured, live)
    assert b"a?.png" in out.getvalue()
    assert b"b?.png" in out.getvalue()
    assert "a?.png: no image" in Page(page_of(tmp_path, both, measured, live)).texts
    json.dumps(content_of(both, measured, live)).encode()


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
    assert page.tags.count("svg") == 3
    assert {*members, ENSEMBLE} <= set(page.drawn)


def test_one_image_is_enough_for_every_report(tmp_path, both):
    measured = measure(both, truth=(1,), answer=(0,))
    json.dumps(content_of(both, measured), allow_nan=False)
    assert "0.0000" in shown(both, measured)
    assert Page(page_of(tmp_path, both, measured)).tags.count("svg") == 3


def test_an_ensemble_that_some_members_lack_is_not_reported(tmp_path, both):
    """One member was never quantised: INT8 has scores of the other alone."""
    measured = measure(both)
    parts: list[Any] = [measured.tallies["INT8"], measured.cpu_ms_per_image["unsure"]]
    for of_int8 in parts:
        for gone in ("unsure", ENSEMBLE, "INT8"):
            of_int8.pop(gone, None)
    del measured.over_members["INT8"]
    json.dumps(content_of(both, measured), allow_nan=False)
    assert shown(both, measured).count("INT8") >= 1
    page = Page(page_of(tmp_path, both, measured))
    assert page.tags.count("svg") == 3
    assert "sure" in page.drawn
    assert "unsure" not in page.drawn
