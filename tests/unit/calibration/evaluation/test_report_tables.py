"""The tables: every figure in its place, and names and notes are no markup."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from calibration.evaluation.record import record_of
from calibration.evaluation.report import as_json, points, show
from models.model_set import ModelSet
from tests.support.calibration.made_evaluations import (
    HOSTILE,
    content_of,
    live_result,
    measure,
    model_set_of,
)
from tests.support.calibration.report_output import Page, page_of, shown


@pytest.fixture
def both(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set")


@pytest.fixture
def hostile(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set", HOSTILE)


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


@pytest.mark.parametrize(("value", "says"), [(0.005, "+0.50"), (-0.1, "-10.00"), (0.0, "+0.00")])
def test_points_have_a_sign(value, says):
    assert points(value) == says
