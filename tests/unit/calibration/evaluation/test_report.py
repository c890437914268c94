"""The report of an evaluation as tables, JSON and a page with plots; nothing in it is markup."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError
from rich.console import Console

from calibration.evaluation import report_page
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.plans import MAX_LOST, PlanScore, PlanSearch, Step
from calibration.evaluation.report import (
    as_json,
    plans_json,
    record_of,
    show,
    show_modes,
    show_plans,
    verdict,
)
from calibration.evaluation.report_page import rendered, write_plot
from calibration.statistics import ModeTally, Tally
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
from tests.support.calibration.report_output import Page, drawn, page_of, shown
from tests.support.cases import cases
from tests.support.plans import FIGURES, plan_of
from tests.support.tiny_networks import LABELS

TITLED = ("calibration.commands", "drift.html.j2")


def test_the_tables_have_every_classifier_and_its_cost(both):
    lines = shown(both, measure(both)).splitlines()
    assert [re.findall(r"[^│┃\s]+", line)[:3] for line in lines if re.match(r"│ \w", line)][:6] == [
        ["sure", "f32", "0.7000"],
        ["sure", "INT8", "0.7000"],
        ["unsure", "f32", "0.7000"],
        ["unsure", "INT8", "0.7000"],
        ["ensemble", "f32", "0.7000"],
        ["ensemble", "INT8", "0.7000"],
    ]
    (row,) = re.findall("│ ensemble │ INT8 .*│", shown(both, measure(both)))
    assert row.rstrip("│ ").endswith("2.5")


@cases(
    "times, max_drop, says",
    (1, 0.1, "not known"),  # 2 of 10 images
    (100, 0.1, "refused: over +10.00"),
    (100, 0.25, "verified"),
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


@cases("precision, members", ("INT8", ("only",)), ("FP16", ("sure", "unsure")))
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


def test_values_are_escaped_and_none_may_be_missing():
    values: dict[str, Any] = dict.fromkeys(("verdict", "notes", "rows", "classes"), "")
    values |= {"is_drift": False, "sides": {}, "level": 0.05, "num_more": 0, "confidence": ""}
    assert b"&lt;b&gt;caf?&lt;/b&gt;" in rendered(*TITLED, title="<b>caf\udce9</b>", **values)
    with pytest.raises(UndefinedError):
        rendered(*TITLED)


def tally_of(truth: list[int], answer: list[int], num_classes: int) -> Tally:
    found = Tally(num_classes)
    found.add(rows_of(tuple(answer), num_classes, 0.9), np.array(truth))
    return found


def test_bars_are_in_the_order_of_the_worst_and_ties_in_the_sets():
    tally = tally_of([0, 1, 1, 2, 2, 4], [0, 0, 1, 0, 2, 0], 5)
    assert report_page.worst_classes(tally) == [4, 1, 2, 0]  # 3 has no images
    tallies = {
        "a": tally_of([0, 1, 2], [1, 1, 2], 3),
        "ensemble": tally_of([0, 1, 1, 2], [0, 1, 0, 0], 3),
    }
    texts = drawn(report_page.per_class(tallies, LABELS))
    labels = [text for text in texts if text in LABELS]
    assert labels == ["mostly red", "mostly green", "mostly blue"]
    assert {"a", "ensemble"} <= set(texts)


def test_confusions_are_shares_of_the_true_class_with_what_is_not_drawn():
    tally = tally_of([0] * 4 + [1] * 2 + [2], [0, 0, 0, 1, 1, 1, 2], 3)
    numbers = [text for text in drawn(report_page.confusion(tally, LABELS)) if text.isdigit()]
    assert sorted(numbers) == ["100", "100", "25", "75"]
    # Two images of class 0, one taken for class 1, which has no images of its own.
    assert [
        t for t in drawn(report_page.confusion(tally_of([0, 0], [0, 1], 3), LABELS)) if t.isdigit()
    ] == ["50"]


def test_a_classifier_has_one_colour_in_all_plots_on_any_day():
    names = ["a", "b", "ensemble"]
    colors = [report_page.color_of(name, names) for name in names]
    assert len(set(colors)) == 3
    assert report_page.color_of("b", ["ensemble", "a", "b"]) == colors[1]
    assert report_page.color_of("m8", [f"m{i}" for i in range(9)]) in report_page.MEMBER_COLORS
    tallies = {name: tally_of([0, 1], [0, 0], 2) for name in names}
    for svg in (report_page.per_class(tallies, ("x", "y")), report_page.reliability(tallies)):
        assert all(color in svg for color in colors)
    svg = report_page.reliability({"a": tally_of([0], [0], 2)})
    assert report_page.reliability({"a": tally_of([0], [0], 2)}) == svg
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "dc:date" not in svg


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a page that has every part there can be."""
    folder = tmp_path_factory.mktemp("page")
    model_set = model_set_of(folder / "set")
    measured = measure(model_set, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0))
    return page_of(folder, model_set, measured, live_result(num_same=8))


def test_text_stays_text(tmp_path, hostile):
    name = "<i>photos</i>/a & b"
    measured = measure(
        hostile,
        truth=(0, 1, 2, 3, 4),
        answer=(1, 1, 2, 3, 4),
        name=name,
        notes=(f"no images of {HOSTILE[0]}",),
    )
    measured.unreadable = [f"{HOSTILE[0]}.png: {HOSTILE[1]}"]
    live = live_result(num_same=9, differences=[f"{HOSTILE[0]} {HOSTILE[2]}"])
    page = Page(page_of(tmp_path, hostile, measured, live))
    assert not {"script", "b", "i"} & set(page.tags)
    assert f"no images of {HOSTILE[0]}" in page.texts
    assert f"{HOSTILE[0]}.png: {HOSTILE[1]}" in page.texts
    assert f"{HOSTILE[0]} {HOSTILE[2]}" in page.texts
    assert f"tiny: accuracy on {name}" in page.texts
    for label in HOSTILE:  # the bars' labels, and both axes of the confusions
        assert page.drawn.count(label) == 3, label


def test_the_page_loads_nothing_and_has_the_figures_of_the_json(whole_page):
    page, text = Page(whole_page), whole_page
    loading = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
    values = [value for name, value in page.attributes if name in loading]
    assert values  # markers and the confusions' picture
    assert all(value.startswith(("#", "data:image/")) for value in values)
    assert all(found == "#" for found in re.findall(r"url\(['\"]?(.)", text))
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in text
    assert ("http-equiv", "Content-Security-Policy") in page.attributes
    assert "<!DOCTYPE svg" not in text
    assert "<?xml" not in text
    page = Page(whole_page)
    assert page.texts.count("0.9000") == 3  # classifiers
    assert (page.texts.count("0.7000"), page.texts.count("+20.00")) == (3, 3)
    assert any(t.startswith("8 of 10 images answered as in process") for t in page.texts)


def test_a_class_without_images_is_not_drawn(tmp_path, both):
    page = Page(page_of(tmp_path, both, measure(both, truth=(0, 0, 2), answer=(0, 1, 2))))
    assert "mostly blue" in page.drawn
    assert "mostly green" not in page.drawn
    assert "the worst" not in page.text


def test_of_a_thousand_classes_the_worst_twenty_are_drawn(tmp_path):
    labels = tuple(f"class {i:04}" for i in range(1000))
    model_set = model_set_of(tmp_path / "set", labels, ("only",), ("INT8",))
    truth = tuple(range(1000))
    wrong = set(range(500, 800, 10))  # thirty
    answer = tuple((t + 1) % 1000 if t in wrong else t for t in truth)
    page = Page(page_of(tmp_path, model_set, measure(model_set, truth, answer)))
    classes = [text for text in page.drawn if text.startswith("class ")]
    assert set(classes) == {f"class {i:04}" for i in range(500, 700, 10)}
    assert len(classes) == 3 * 20
    assert any("the worst 20 of 1000" in text for text in page.texts)


def test_the_page_replaces_an_older_one_in_one_step(tmp_path, both):
    (tmp_path / "page.html").write_text("old")
    assert "old" not in Page(page_of(tmp_path, both, measure(both))).texts
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["page.html"]


def score(lost: float, low: float, high: float, *members: str) -> PlanScore:
    figures = FIGURES.model_copy(update={"lost": lost, "lost_interval": (low, high)})
    first, *others = members
    steps = [Step((first,), (first,), 1.0, 0.7 if others else None)]
    steps += [Step((name,), (first, name), 1.0, None) for name in others]
    return PlanScore(tuple(steps), FIGURES, figures, (0.75, 0.25) if others else (1.0,))


def search_of(best: PlanScore, *others: PlanScore) -> PlanSearch:
    plan = plan_of("key", ((("cheap",), 0.7), (("dear",), None)))
    record = plan.model_copy(update={"judged": best.judged})
    return PlanSearch("INT8", {"dear": 9.0, "cheap": 1.0}, (best, *others), best, record)


def printed(show, *arguments, width: int = 80) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False), *arguments)
    return out.getvalue()


@cases(
    "lost, low, high, says",
    (-0.001, -0.006, 0.004, "its loss is within 0.5 points"),
    (0.02, 0.011, 0.03, "it loses more than 0.5 points, and that is no chance"),
    (0.001, -0.019, 0.021, "is not known: about 2,400 more images would tell"),
    (MAX_LOST, -0.02, 0.03, "is not known: many more images would tell"),
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
