"""Parameters of a request: one check for both interfaces, with errors that say what to send."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadParameterError
from app.graph.parameters import checked_threshold, checked_top_k, lane_of, parse_timeout_s


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_top_k_within_the_classes(top_k: int) -> None:
    assert checked_top_k(top_k, 3) == top_k


@pytest.mark.parametrize("top_k", [-1, 0, 4])
def test_a_top_k_outside_of_them(top_k: int) -> None:
    with pytest.raises(BadParameterError, match=f"top_k is {top_k}; .* ask for 1 to 3"):
        checked_top_k(top_k, 3)


def test_an_endless_top_k_is_not_repeated_whole() -> None:
    with pytest.raises(BadParameterError) as caught:
        checked_top_k(10**4000, 3)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("given", "seconds"), [("2", 2.0), ("0.25", 0.25), (" 1e-3 ", 0.001)])
def test_a_time(given: str, seconds: float) -> None:
    assert parse_timeout_s(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "soon", "0", "-1", "nan", "5_0", "1e1_0", "\u0665", "x" * 10_000]
)
def test_a_time_that_is_none(given: str) -> None:
    with pytest.raises(BadParameterError, match="give seconds as a number above 0") as caught:
        parse_timeout_s(given)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("priority", "num_images", "lane"),
    [
        (None, 1, "interactive"),
        (None, 2, "bulk"),
        ("u=3", 5, "interactive"),
        ("u=0, i", 5, "interactive"),
        ("i, u=7", 1, "bulk"),
        ("u = 4", 1, "bulk"),
        ("i", 1, "interactive"),
        ("", 3, "bulk"),
        ("urgent", 1, "interactive"),
        ("xu=7", 1, "interactive"),
    ],
)
def test_who_gets_into_which_lane(priority, num_images, lane):
    assert lane_of(priority, num_images) == lane


@pytest.mark.parametrize("priority", ["u=8", "u=99999999999999999999999999"])
def test_an_urgency_that_is_none(priority):
    with pytest.raises(BadParameterError, match="0 to 7"):
        lane_of(priority, 1)


@given(st.text(max_size=40), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_any_header_is_a_lane_or_refused(priority, num_images):
    try:
        assert lane_of(priority, num_images) in ("interactive", "bulk")
    except BadParameterError:
        assert "u" in priority


@pytest.mark.parametrize("threshold", [None, 0.01, 0.5, 0.999])
def test_a_threshold_of_a_multi_label_set(threshold: float | None) -> None:
    assert checked_threshold(threshold, is_multi_label=True) == threshold


@pytest.mark.parametrize("threshold", [0.0, 1.0, -3.0, math.nan, math.inf])
def test_a_threshold_outside_of_the_scores(threshold: float) -> None:
    with pytest.raises(BadParameterError, match=r"threshold is .*above 0 and below 1"):
        checked_threshold(threshold, is_multi_label=True)


def test_a_threshold_of_classes_that_exclude_each_other() -> None:
    assert checked_threshold(None, is_multi_label=False) is None
    with pytest.raises(BadParameterError, match=r"threshold is 0\.5; .* leave it out"):
        checked_threshold(0.5, is_multi_label=False)
