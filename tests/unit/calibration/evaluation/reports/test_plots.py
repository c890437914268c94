"""The plots: which classes, in which order and colour."""

import numpy as np

from calibration.evaluation.reports import plots
from calibration.evaluation.tally import Tally
from tests.support.calibration.made_evaluations import rows_of
from tests.support.calibration.report_output import drawn
from tests.support.tiny_networks import LABELS


def tally_of(truth: list[int], answer: list[int], num_classes: int) -> Tally:
    found = Tally(num_classes)
    found.add(rows_of(tuple(answer), num_classes, 0.9), np.array(truth))
    return found


def test_the_worst_classes_come_first_and_ties_keep_the_sets_order():
    tally = tally_of([0, 1, 1, 2, 2, 4], [0, 0, 1, 0, 2, 0], 5)
    assert plots.worst_classes(tally) == [4, 1, 2, 0]  # 3 has no images


def test_bars_are_in_the_order_of_the_ensembles_worst():
    tallies = {
        "a": tally_of([0, 1, 2], [1, 1, 2], 3),
        "ensemble": tally_of([0, 1, 1, 2], [0, 1, 0, 0], 3),
    }
    texts = drawn(plots.per_class(tallies, LABELS))
    labels = [text for text in texts if text in LABELS]
    assert labels == ["mostly red", "mostly green", "mostly blue"]
    assert {"a", "ensemble"} <= set(texts)


def test_confusions_are_shares_of_the_true_class():
    tally = tally_of([0] * 4 + [1] * 2 + [2], [0, 0, 0, 1, 1, 1, 2], 3)
    numbers = [text for text in drawn(plots.confusion(tally, LABELS)) if text.isdigit()]
    assert sorted(numbers) == ["100", "100", "25", "75"]


def test_what_a_class_left_out_of_the_picture_was_taken_for_still_counts():
    """Two images of class 0, one taken for class 1, which has no images of its own."""
    numbers = [
        t for t in drawn(plots.confusion(tally_of([0, 0], [0, 1], 3), LABELS)) if t.isdigit()
    ]
    assert numbers == ["50"]


def test_a_classifier_has_one_colour_in_all_plots():
    names = ["a", "b", "ensemble"]
    colors = [plots.color_of(name, names) for name in names]
    assert len(set(colors)) == 3
    assert plots.color_of("b", ["ensemble", "a", "b"]) == colors[1]
    many = [f"m{i}" for i in range(9)]
    assert plots.color_of("m8", many) in plots.MEMBER_COLORS
    tallies = {name: tally_of([0, 1], [0, 0], 2) for name in names}
    for svg in (plots.per_class(tallies, ("x", "y")), plots.reliability(tallies)):
        assert all(color in svg for color in colors)


def test_the_same_counts_give_the_same_plot_on_any_day():
    svg = plots.reliability({"a": tally_of([0], [0], 2)})
    assert plots.reliability({"a": tally_of([0], [0], 2)}) == svg
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "dc:date" not in svg
