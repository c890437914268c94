"""Comparisons: distances, intervals that can be checked by hand, sums over Gateways."""

import math

import numpy as np
import pytest

from app.metrics.table import BUCKETS_MS
from app.traffic.comparison import (
    MAX_DISAGREEMENTS,
    Comparison,
    Disagreement,
    Figures,
    VersionFigures,
    distance,
)

ROWS = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], np.float32)
NONE = (math.nan, (math.nan, math.nan))  # of figures that are not there


def disagreement(number: int) -> Disagreement:
    return Disagreement(f"r{number}", 0, ["cat", "dog"])


def compared(num_agreed: int, num_differing: int, apart: float = 0.5) -> Comparison:
    comparison = Comparison()
    for _ in range(num_agreed):
        comparison.note(0.0, None)
    for number in range(num_differing):
        comparison.note(apart, disagreement(number))
    return comparison


def test_the_distance_of_exclusive_classes_is_the_total_variation() -> None:
    assert distance(ROWS[0], ROWS[0], is_multi_label=False) == 0
    assert distance(ROWS[0], ROWS[1], is_multi_label=False) == pytest.approx(0.6)
    sure = np.eye(3, dtype=np.float32)
    assert distance(sure[0], sure[1], is_multi_label=False) == 1


def test_the_distance_of_scores_is_their_mean_difference() -> None:
    assert distance(ROWS[0], ROWS[1], is_multi_label=True) == pytest.approx(0.4)


def test_agreement_has_wilsons_interval() -> None:
    share, (low, high) = compared(90, 10).agreement or NONE
    assert share == 0.9
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    share, (low, high) = compared(200, 0).agreement or NONE
    assert (share, high) == (1.0, 1.0)
    assert low == pytest.approx(0.9812, abs=1e-4)
    assert Comparison().agreement is None


def test_the_total_variation_has_the_interval_of_a_mean() -> None:
    mean, (low, high) = compared(50, 50, 0.2).total_variation or NONE
    deviation = 0.1 * math.sqrt(100 / 99)
    assert mean == pytest.approx(0.1)
    assert high - mean == pytest.approx(1.96 * deviation / 10, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert compared(1, 0).total_variation is None


def test_gateways_figures_add_up() -> None:
    whole = compared(90, 10)
    parts = compared(40, 4)
    parts.add(compared(50, 6))
    assert (parts.compared, parts.agreed) == (whole.compared, whole.agreed)
    assert parts.agreement == whole.agreement
    first, second = Figures(), Figures()
    first.of_version("a").answered = 3
    second.of_version("a").answered = 4
    second.of_version("a").latencies[2] = 5
    second.of_pair("a", "b").note(0.1, None)
    first.add(second)
    assert first.of_version("a").answered == 7
    assert first.of_version("a").latencies[2] == 5
    assert first.of_pair("a", "b").compared == 1


def test_the_last_disagreements_are_kept() -> None:
    comparison = compared(0, 3 * MAX_DISAGREEMENTS)
    ids = [of.request_id for of in comparison.disagreements]
    assert ids == [f"r{number}" for number in range(2 * MAX_DISAGREEMENTS, 3 * MAX_DISAGREEMENTS)]
    comparison.add(compared(0, MAX_DISAGREEMENTS))
    assert len(comparison.disagreements) == MAX_DISAGREEMENTS


def test_latency_is_the_bound_of_its_bucket() -> None:
    figures = VersionFigures()
    assert figures.latency_ms(0.5) is None
    for latency_ms in (*[0.1] * 98, 70.0, 10**6):
        figures.note_answers([], latency_ms)
    assert figures.latency_ms(0.5) == BUCKETS_MS[0]
    assert figures.latency_ms(0.99) == 80
    assert figures.latency_ms(1.0) == BUCKETS_MS[-1]
