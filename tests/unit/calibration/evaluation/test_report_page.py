"""Pages and their plots: which classes, in which order and colour; the same figures as JSON."""

import re
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

from calibration.evaluation import report_page
from calibration.evaluation.report_page import rendered
from calibration.statistics import Tally
from tests.support.calibration.made_evaluations import (
    HOSTILE,
    live_result,
    measure,
    model_set_of,
    rows_of,
)
from tests.support.calibration.report_output import Page, drawn, page_of
from tests.support.tiny_networks import LABELS

TITLED = ("calibration.commands", "drift.html.j2")


def test_values_are_escaped_and_need_not_be_utf8() -> None:
    values: dict[str, Any] = dict.fromkeys(("verdict", "notes", "rows", "classes"), "")
    values |= {"is_drift": False, "sides": {}, "level": 0.05, "num_more": 0, "confidence": ""}
    page = rendered(*TITLED, title="<b>caf\udce9</b>", **values)
    assert b"&lt;b&gt;caf?&lt;/b&gt;" in page


def test_a_value_that_the_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendered(*TITLED)


def tally_of(truth: list[int], answer: list[int], num_classes: int) -> Tally:
    found = Tally(num_classes)
    found.add(rows_of(tuple(answer), num_classes, 0.9), np.array(truth))
    return found


def test_the_worst_classes_come_first_and_ties_keep_the_sets_order():
    tally = tally_of([0, 1, 1, 2, 2, 4], [0, 0, 1, 0, 2, 0], 5)
    assert report_page.worst_classes(tally) == [4, 1, 2, 0]  # 3 has no images


def test_bars_are_in_the_order_of_the_ensembles_worst():
    tallies = {
        "a": tally_of([0, 1, 2], [1, 1, 2], 3),
        "ensemble": tally_of([0, 1, 1, 2], [0, 1, 0, 0], 3),
    }
    texts = drawn(report_page.per_class(tallies, LABELS))
    labels = [text for text in texts if text in LABELS]
    assert labels == ["mostly red", "mostly green", "mostly blue"]
    assert {"a", "ensemble"} <= set(texts)


def test_confusions_are_shares_of_the_true_class():
    tally = tally_of([0] * 4 + [1] * 2 + [2], [0, 0, 0, 1, 1, 1, 2], 3)
    numbers = [text for text in drawn(report_page.confusion(tally, LABELS)) if text.isdigit()]
    assert sorted(numbers) == ["100", "100", "25", "75"]


def test_what_a_class_left_out_of_the_picture_was_taken_for_still_counts():
    """Two images of class 0, one taken for class 1, which has no images of its own."""
    numbers = [
        t for t in drawn(report_page.confusion(tally_of([0, 0], [0, 1], 3), LABELS)) if t.isdigit()
    ]
    assert numbers == ["50"]


def test_a_classifier_has_one_colour_in_all_plots():
    names = ["a", "b", "ensemble"]
    colors = [report_page.color_of(name, names) for name in names]
    assert len(set(colors)) == 3
    assert report_page.color_of("b", ["ensemble", "a", "b"]) == colors[1]
    many = [f"m{i}" for i in range(9)]
    assert report_page.color_of("m8", many) in report_page.MEMBER_COLORS
    tallies = {name: tally_of([0, 1], [0, 0], 2) for name in names}
    for svg in (report_page.per_class(tallies, ("x", "y")), report_page.reliability(tallies)):
        assert all(color in svg for color in colors)


def test_the_same_counts_give_the_same_plot_on_any_day():
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
    text = page_of(tmp_path, hostile, measured, live)
    page = Page(text)
    assert not {"script", "b", "i"} & set(page.tags)
    assert f"no images of {HOSTILE[0]}" in page.texts
    assert f"{HOSTILE[0]}.png: {HOSTILE[1]}" in page.texts
    assert f"{HOSTILE[0]} {HOSTILE[2]}" in page.texts
    assert f"tiny: accuracy on {name}" in page.texts
    for label in HOSTILE:  # the bars' labels, and both axes of the confusions
        assert page.drawn.count(label) == 3, label


def test_the_page_loads_nothing(whole_page):
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


def test_the_page_has_the_figures_of_the_json(whole_page):
    page = Page(whole_page)
    assert page.texts.count("0.9000") == 3  # classifiers
    assert page.texts.count("0.7000") == 3
    assert page.texts.count("+20.00") == 3
    assert any(t.startswith("8 of 10 images answered as in process") for t in page.texts)


def test_a_class_without_images_is_not_drawn(tmp_path, both):
    measured = measure(both, truth=(0, 0, 2), answer=(0, 1, 2))
    page = Page(page_of(tmp_path, both, measured))
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
