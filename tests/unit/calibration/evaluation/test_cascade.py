"""The cascade's curve against a loop that decides each image as serving does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.evaluation.cascade import CascadePoint, CascadeTally, cheapest_within
from models.accuracy import wilson_interval
from models.ensemble import is_sure

BOUNDED = settings(max_examples=100, deadline=None, database=None)
CPU_MS = {"first": 10.0, "second": 20.0, "third": 5.0}
# Also margins on the very edge of a bin, and no margin at all.
PROBABILITIES = st.sampled_from([0.0, 0.25, 0.35, 0.5, 0.65, 0.9, 1.0]) | st.floats(0, 1, width=32)


@st.composite
def judged(draw, max_images: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows (N, 3) of the first member, whether it was right (N,), and whether all were."""
    num_images = draw(st.integers(1, max_images))
    rows = draw(hnp.arrays(np.float32, (num_images, 3), elements=PROBABILITIES))
    first, every = (draw(hnp.arrays(np.bool_, num_images)) for _ in range(2))
    return rows, first, every


def curve_of(rows: np.ndarray, first: np.ndarray, every: np.ndarray) -> list[CascadePoint]:
    found = CascadeTally(list(CPU_MS))
    found.add(rows, first, every)
    return found.curve(CPU_MS)


@BOUNDED
@given(images=judged())
def test_every_point_is_that_of_a_loop_over_the_images(images):
    rows, first, every = images
    for point in curve_of(*images)[1:]:
        assert point.margin is not None
        sure = is_sure(rows, point.margin)
        right = [f if s else e for f, e, s in zip(first, every, sure, strict=True)]
        assert point.top1 == pytest.approx(sum(right) / len(rows))
        assert point.share_skipped == pytest.approx(sure.mean())
        assert point.lost.difference == pytest.approx(every.mean() - np.mean(right))
        assert point.top1_interval == wilson_interval(sum(right), len(rows))


@BOUNDED
@given(images=judged())
def test_the_ends_are_the_whole_ensemble_and_the_first_member_alone(images):
    _, first, every = images
    never, *_, always = curve_of(*images)
    assert (never.margin, always.margin) == (None, 0.0)
    assert never.top1 == pytest.approx(every.mean())
    assert always.top1 == pytest.approx(first.mean())
    assert (never.share_skipped, always.share_skipped) == (0.0, 1.0)
    assert (never.cpu_ms_per_image, always.cpu_ms_per_image) == (35.0, 10.0)
    assert never.lost.difference == 0


@BOUNDED
@given(images=judged())
def test_a_lower_threshold_skips_more_and_costs_less(images):
    points = curve_of(*images)
    shares = [point.share_skipped for point in points]
    costs = [point.cpu_ms_per_image for point in points]
    assert shares == sorted(shares)
    assert costs == sorted(costs, reverse=True)
    margins = [point.margin for point in points[1:] if point.margin is not None]
    assert len(margins) == len(points) - 1
    assert margins == sorted(set(margins), reverse=True)
    assert all(0 <= margin < 1 for margin in margins)
    assert len(points) <= 20


@BOUNDED
@given(images=judged(), cut=st.integers(0, 30))
def test_how_the_images_are_cut_into_batches_changes_nothing(images, cut):
    parts = CascadeTally(list(CPU_MS))
    for part in (slice(None, cut), slice(cut, None)):
        parts.add(*(values[part] for values in images))
    assert parts.curve(CPU_MS) == curve_of(*images)


@BOUNDED
@given(images=judged(), allowed=st.floats(0, 1))
def test_no_setting_within_reach_is_cheaper_than_the_one_chosen(images, allowed):
    points = curve_of(*images)
    best = cheapest_within(points, allowed)
    assert best.lost.difference <= allowed
    assert best.margin is None or 0 < best.margin < 1  # what the application takes
    cheaper = [p for p in points if p.cpu_ms_per_image < best.cpu_ms_per_image and p.is_setting]
    assert all(p.lost.difference > allowed for p in cheaper)


def test_tenths_of_the_images_are_among_the_thresholds():
    """A network whose margins are all near one: steps of 0.1 would tell nothing."""
    rows = np.array([[0.95 + i / 2500, 0.05 - i / 2500] for i in range(100)], np.float32)
    right = np.ones(100, bool)
    shares = {round(p.share_skipped, 1) for p in curve_of(rows, right, right)}
    assert shares == {n / 10 for n in range(11)}


def test_the_cheapest_within_half_a_point():
    """Of 1000 images the first is wrong where its margin is under 0.4, and in 4 of the rest."""
    margins = np.linspace(0, 0.999, 1000)
    rows = np.stack([(1 + margins) / 2, (1 - margins) / 2], axis=1).astype(np.float32)
    first = margins > 0.4
    first[[500, 600, 700, 800]] = False
    points = curve_of(rows, first, np.ones(1000, bool))
    best = cheapest_within(points, 0.005)
    assert best.margin == pytest.approx(0.4, abs=0.002)
    assert best.lost.difference == pytest.approx(0.004, abs=0.001)
    assert best.share_skipped == pytest.approx(0.6, abs=0.002)
    assert best.cpu_ms_per_image == pytest.approx(10 + 0.4 * 25, abs=0.1)
