"""The plan of the traffic, its book, the sticky choice of a version, and comparisons."""

import math
import pickle

import numpy as np
import pytest

from app.errors import BadParameterError, PlanChangedError
from app.graph.hub_link import MAX_REPORTS
from app.telemetry.metric_table import BUCKETS_MS
from app.traffic.plan import (
    HASHED_BYTES,
    MAX_DISAGREEMENTS,
    MAX_EARLIER,
    Comparison,
    Disagreement,
    Figures,
    Plan,
    Split,
    TrafficBook,
    VersionFigures,
    chosen,
    distance,
    sticky_key,
)
from tests.support.cases import cases
from tests.support.hand_clock import HandClock

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"


@cases(
    "shares, shadow, message",
    ({A: 95, B: 2}, None, r"sum to 97, not to 100 \(.*95, .*2\): 3 are missing"),
    ({A: 95, B: 10}, None, r"sum to 105, not to 100 .*: 5 more than 100"),
    ({}, None, "sum to 0, not to 100"),
    ({A: 105, B: -5}, None, "is 105; give a percent"),
    ({A: 95, B: 5}, B, "is the shadow and answers 5 %"),
)
def test_shares_that_are_no_split_are_refused(shares, shadow, message) -> None:
    with pytest.raises(BadParameterError, match=message):
        Split(shares, shadow)


@cases(
    "split, answering, versions, main",
    (Split({A: 100 / 3, B: 100 / 3, C: 100 / 3}), (A, B, C), (A, B, C), A),
    (Split({A: 100, B: 0}, B), (A,), (A, B), A),
    (Split({A: 100, B: 0}, C), (A,), (A, B, C), A),
    (Split({A: 5, B: 95}), (A, B), (A, B), B),
    (Split({A: 50, B: 50}), (A, B), (A, B), A),
)
def test_who_answers_and_who_is_the_main_version(split, answering, versions, main):
    assert (split.answering, split.versions, split.main) == (answering, versions, main)


def test_a_promoted_version_answers_everything_and_is_no_shadow() -> None:
    assert Split({A: 95, B: 5}, C).promoted(B) == Split({B: 100}, C)
    assert Split({A: 100}, C).promoted(C) == Split({C: 100})


def test_rollback_goes_back_step_by_step() -> None:
    first, second, third = Split({A: 100}, B), Split({A: 95, B: 5}), Split({B: 100})
    plan = Plan.first(first).changed(second).changed(third)
    assert (plan.revision, plan.split) == (2, third)
    back = plan.rolled_back()
    assert (back.revision, back.split) == (3, second)
    again = back.rolled_back()
    assert (again.revision, again.split) == (4, first)
    with pytest.raises(BadParameterError, match="no earlier"):
        again.rolled_back()


def test_a_plan_keeps_a_bounded_number_of_earlier_ones() -> None:
    plan = Plan.first(Split({A: 100}))
    for _ in range(3 * MAX_EARLIER):
        plan = plan.changed(Split({A: 95, B: 5}))
    assert len(plan.earlier) == MAX_EARLIER


def test_plans_of_other_settings_have_another_origin() -> None:
    first = Plan.first(Split({A: 100}))
    assert first.origin != Plan.first(Split({B: 100})).origin
    assert first.origin == Plan.first(Split({A: 100.0})).changed(Split({B: 100})).origin


def test_a_plan_has_the_same_order_in_every_process() -> None:
    plan = FIRST.changed(CANARY)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.order == plan.order
    assert "0x" not in plan.order[1]  # no address


@cases(
    "content, message",
    ([], "send"),
    ({}, "send"),
    ({"shares": {A: "95"}}, "is no number"),
    ({"shares": {A: True}}, "is no number"),
    ({"shares": {A: 100}, "shadow": 3}, "shadow is not a string"),
)
def test_another_form_is_refused(content: object, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        Split.of(content)


FIRST = Plan.first(Split({A: 100.0}, B))
CANARY = Split({A: 95.0, B: 5.0})
NO_FIGURES = Figures()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def book(clock: HandClock) -> TrafficBook:
    return TrafficBook(FIRST, clock)


def answered(number: int) -> Figures:
    figures = Figures()
    figures.of_version(A).answered = number
    return figures


def test_two_plans_of_one_revision_are_settled_alike_whoever_reports_first(clock):
    """A book began anew and made a plan before it heard of the Gateways'."""
    plans = [FIRST.changed(CANARY), FIRST.changed(Split({A: 60.0, B: 40.0}))]
    taken = []
    for reported in (plans, plans[::-1]):
        book = TrafficBook(FIRST, clock)
        for number, plan in enumerate(reported):
            book.report(f"g{number}", plan, NO_FIGURES)
        taken.append(book.facts)
    assert taken[0] == taken[1]
    assert taken[0] in plans


def test_a_change_from_an_old_plan_is_refused(book: TrafficBook) -> None:
    book.change(CANARY, 0)
    with pytest.raises(PlanChangedError, match="at revision 1, and yours was made from 0"):
        book.change(Split({B: 100.0}), 0)
    assert book.facts.revision == 1


def test_a_refused_change_says_what_differs(book: TrafficBook) -> None:
    book.change(CANARY, 0)
    book.change(None, 1)
    says = f"revision 2, .* it is {A} 100 %, shadow {B} in place of {A} 95 %, {B} 5 %; look"
    with pytest.raises(PlanChangedError, match=says):
        book.change(Split({B: 100.0}), 1)
    with pytest.raises(PlanChangedError, match=f"from 9: it is {A} 100 %, shadow {B}; look"):
        book.change(None, 9)


def test_the_versions_of_the_last_ten_revisions_are_named() -> None:
    plan = Plan.first(Split({A: 100.0})).changed(Split({A: 99.0, C: 1.0})).rolled_back()
    for _ in range(MAX_EARLIER):
        assert plan.named == {A, C}  # though no rollback leads there
        plan = plan.changed(Split({A: 100.0}))
    assert plan.named == {A}


def test_rollback_makes_the_split_before_the_newest(book: TrafficBook) -> None:
    book.change(Split({B: 100.0}), None)
    assert book.change(None, 1) == 2
    assert book.facts.split == FIRST.split


def test_reports_of_gateways_that_are_gone_are_added_up_and_nothing_is_lost(book, clock):
    for number in range(2 * MAX_REPORTS):
        book.report(f"g{number}", FIRST, answered(1))
        clock.now += 1.0
    assert len(book._reports) == MAX_REPORTS
    assert book.status().figures.versions[A].answered == 2 * MAX_REPORTS


def test_gateways_that_come_back_after_a_minute_count_once(book, clock):
    """They could not reach the deployment, which went on."""
    for number in (10, 11):
        clock.now += 61.0
        for gateway in ("g1", "g2", "g3"):
            book.report(gateway, FIRST, answered(number))
    assert book.status().figures.versions[A].answered == 3 * 11


NUM = 20_000
KEYS = [sticky_key(None, b"photo %d" % number) for number in range(NUM)]


def keys_of(name: str, shares: dict[str, float]) -> set[bytes]:
    return {key for key in KEYS if chosen(key, shares) == name}


@pytest.mark.parametrize("share", [1, 5, 50])
def test_a_version_is_chosen_as_often_as_its_share_says(share: float) -> None:
    number = len(keys_of(B, {A: 100 - share, B: share}))
    assert number == pytest.approx(NUM * share / 100, abs=5 * (NUM * share / 100) ** 0.5)


@pytest.mark.parametrize("others", [{}, {C: 5.0}], ids=["two", "three"])
def test_a_version_whose_share_grows_keeps_its_photos(others) -> None:
    share = 100.0 - sum(others.values())
    before = keys_of(B, {A: share - 5, B: 5} | others)
    after = keys_of(B, {A: share - 10, B: 10} | others)
    assert before < after
    assert keys_of(B, {B: 10, A: share - 10} | others) == after  # in whatever order they are named


def test_without_a_share_a_version_is_never_chosen() -> None:
    assert keys_of(B, {A: 100, B: 0}) == set()
    assert len(keys_of(B, {A: 0, B: 100})) == NUM


def test_the_header_decides_where_there_is_a_value() -> None:
    assert sticky_key("anna", b"one") == sticky_key("anna", b"other")
    assert sticky_key("anna", b"one") != sticky_key("ben", b"one")
    assert sticky_key(None, b"one") != sticky_key(None, b"other")
    photo = bytes(HASHED_BYTES)  # photos that begin alike differ by their length
    assert sticky_key(None, photo + b"a") != sticky_key(None, photo)


ROWS = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], np.float32)
NONE = (math.nan, (math.nan, math.nan))  # of figures that are not there


def compared(num_agreed: int, num_differing: int, apart: float = 0.5) -> Comparison:
    comparison = Comparison()
    for _ in range(num_agreed):
        comparison.note(0.0, None)
    for number in range(num_differing):
        comparison.note(apart, Disagreement(f"r{number}", 0, ["cat", "dog"]))
    return comparison


@cases(
    "first, second, is_multi_label, expected",
    (ROWS[0], ROWS[0], False, 0),
    (ROWS[0], ROWS[1], False, 0.6),  # the total variation
    (np.eye(3, dtype=np.float32)[0], np.eye(3, dtype=np.float32)[1], False, 1),
    (ROWS[0], ROWS[1], True, 0.4),  # of scores the mean difference
)
def test_the_distance_of_answers(first, second, is_multi_label, expected) -> None:
    assert distance(first, second, is_multi_label=is_multi_label) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counts", "share", "low", "high"),
    [((90, 10), 0.9, 0.8256, 0.9448), ((200, 0), 1.0, 0.9812, 1.0)],
)
def test_agreement_has_wilsons_interval(counts, share, low, high) -> None:
    agreement = compared(*counts).agreement or NONE
    assert agreement[0] == share
    assert agreement[1] == pytest.approx((low, high), abs=1e-4)
    assert agreement[1][1] <= 1.0
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
