"""Pages of a package's template.

The plots: which classes, in which order and colour.
"""

from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

from calibration.evaluation import report_page
from calibration.evaluation.report_page import rendered
from calibration.statistics import Tally
from tests.support.calibration.made_evaluations import rows_of
from tests.support.calibration.report_output import drawn
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
