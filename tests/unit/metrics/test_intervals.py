"""Wilson's interval at values that its formula gives by hand, and where few were counted."""

import pytest

from app.metrics.intervals import wilson


@pytest.mark.parametrize(
    ("part", "number", "low", "high"),
    [(90, 100, 0.8256, 0.9448), (200, 200, 0.9812, 1.0), (0, 200, 0.0, 0.0188)],
)
def test_the_interval_holds_the_share(part: int, number: int, low: float, high: float) -> None:
    share, interval = wilson(part, number)
    assert share == part / number
    assert interval == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_few_photos_say_little() -> None:
    assert wilson(1, 1)[1][0] == pytest.approx(0.2065, abs=1e-4)
