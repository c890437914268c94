"""Parameters of a request: one check for both interfaces, with errors that say what to send."""

import pytest

from app.errors import BadParameterError
from app.graph.parameters import checked_top_k, parse_timeout_s


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


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "x" * 10_000])
def test_a_time_that_is_none(given: str) -> None:
    with pytest.raises(BadParameterError, match="give seconds as a number above 0") as caught:
        parse_timeout_s(given)
    assert len(str(caught.value)) < 150
