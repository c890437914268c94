"""Wilson's interval of an accuracy, against published values and the score test."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.accuracy import Z95, wilson_interval

BOUNDED = settings(max_examples=100, deadline=None, database=None)


@pytest.mark.parametrize(
    ("num_right", "num_images", "low", "high"),
    [
        (0, 10, 0, 0.2775),
        (10, 10, 0.7225, 1),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (90, 100, 0.8256, 0.9448),  # by hand
        (200, 200, 0.9812, 1),
        (0, 200, 0, 0.0188),
    ],
)
def test_wilson_gives_the_published_intervals(num_right, num_images, low, high):
    assert wilson_interval(num_right, num_images) == pytest.approx((low, high), abs=5e-5)


@BOUNDED
@given(num_images=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_ends_of_a_wilson_interval_are_where_the_score_test_rejects(num_images, share):
    num_right = round(share * num_images)
    low, high = wilson_interval(num_right, num_images)
    assert 0 <= low <= num_right / num_images + 1e-12
    assert num_right / num_images - 1e-12 <= high <= 1
    for end in (low, high):  # (p - end)^2 = z^2 end (1 - end) / n
        squared = (num_right / num_images - end) ** 2
        assert squared == pytest.approx(Z95**2 * end * (1 - end) / num_images, abs=1e-9)


@BOUNDED
@given(num_images=st.integers(1, 1000), share=st.floats(0, 1))
def test_wrong_answers_have_the_mirrored_interval(num_images, share):
    num_right = round(share * num_images)
    low, high = wilson_interval(num_right, num_images)
    mirrored = wilson_interval(num_images - num_right, num_images)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)
