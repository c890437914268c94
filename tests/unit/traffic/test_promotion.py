"""The gate of promote: refusals with figures, and which version is meant."""

from typing import Any

import pytest

from app.errors import BadParameterError
from app.traffic.book import BookStatus
from app.traffic.comparison import Comparison, Disagreement, Figures, VersionFigures
from app.traffic.plan import Plan, Split
from app.traffic.promotion import candidate, refusals
from app.traffic.status import status_of
from tests.support.plain_values import plain

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"


def status(
    num_agreed: int = 0,
    num_differing: int = 0,
    split: Split = Split({A: 95.0, B: 5.0}),  # noqa: B008  # frozen
    refused: str | None = None,
    figures: VersionFigures | None = None,
    **others: str | None,
) -> dict[str, Any]:
    comparison = Comparison()
    for _ in range(num_agreed):
        comparison.note(0.0, None)
    for _ in range(num_differing):
        comparison.note(1.0, Disagreement("r", 0, ["cat", "dog"]))
    pairs = {f"{A} {B}": comparison} if comparison.compared else {}
    book = BookStatus(Plan.first(split), [0], Figures({B: figures} if figures else {}, pairs))
    return plain(status_of(book, {A: None, B: refused} | others))


def test_a_version_that_agrees_on_enough_photos_may_be_promoted() -> None:
    assert refusals(status(200), B, 200, 0.95) == []
    assert refusals(status(995, 5), B, 200, 0.95) == []


def test_too_few_photos_are_refused_with_the_number_that_is_missing() -> None:
    (reason,) = refusals(status(150), B, 200, 0.95)
    assert reason.startswith(f"150 photos were compared with {A}, 50 fewer than 200")
    (reason,) = refusals(status(), B, 200, 0.95)
    assert reason.startswith(f"0 photos were compared with {A}, 200 fewer than 200")


def test_little_agreement_is_refused_with_the_gap_of_the_lower_end() -> None:
    (reason,) = refusals(status(600, 400), B, 200, 0.95)
    assert f"agrees with {A} on 600 of 1000 photos, 60.0% (95 %: from 56.9%)" in reason
    assert "38.1% below 95.0%" in reason


def test_a_failed_copy_counts_as_a_disagreement() -> None:
    """Nine of ten photos fail, and the version agrees on all that it answered."""
    (reason,) = refusals(status(200, figures=VersionFigures(copies_failed=1800)), B, 200, 0.95)
    assert f"agrees with {A} on 200 of 200 photos and 1800 that it failed on, 10.0%" in reason
    _, reason = refusals(status(figures=VersionFigures(copies_failed=50)), B, 200, 0.95)
    assert f"agrees with {A} on 0 of 0 photos and 50 that it failed on, 0.0%" in reason
    assert refusals(status(2000, figures=VersionFigures(copies_failed=3)), B, 200, 0.95) == []


def test_a_version_that_fails_clients_is_refused() -> None:
    (reason,) = refusals(status(200, figures=VersionFigures(98, 2)), B, 200, 0.95)
    assert reason.startswith("2 of its 100 answers to clients failed, 2.0%: more than 1.0%")
    assert refusals(status(200, figures=VersionFigures(99, 1)), B, 200, 0.95) == []


def test_what_the_accuracy_gate_refuses_is_refused_whatever_agrees() -> None:
    assert refusals(status(1000, refused="INT8 lost 3 %"), B, 200, 0.95) == ["INT8 lost 3 %"]


def test_the_main_version_needs_no_comparison_with_itself() -> None:
    assert refusals(status(), A, 200, 0.95) == []


def test_the_only_other_version_is_meant() -> None:
    loaded: dict[str, Any] = {C: None}
    assert candidate(status(), None) == B
    assert candidate(status(split=Split({A: 100.0}, B)), None) == B
    assert candidate(status(**loaded), None) == B  # C is loaded, and has no part in the traffic
    assert candidate(status(), A) == A


@pytest.mark.parametrize(
    ("split", "asked", "message"),
    [
        (Split({A: 90.0, B: 5.0, C: 5.0}), None, f"there are {B}, {C}"),
        (Split({A: 100.0}), None, f"there are {B}"),
        (Split({A: 100.0}), A, "answers every request already"),
        (Split({A: 100.0}), C, f"{C} is not loaded; there are {A}, {B}"),
    ],
)
def test_a_version_that_cannot_be_meant_is_refused(
    split: Split, asked: str | None, message: str
) -> None:
    others: dict[str, Any] = {C: None} if C in split.shares else {}
    with pytest.raises(BadParameterError, match=message):
        candidate(status(split=split, **others), asked)
