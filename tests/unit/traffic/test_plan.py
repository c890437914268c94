"""The plan of the traffic, its book, the sticky choice of a version, and comparisons."""

import math
import pickle

import numpy as np
import pytest

from app.errors import BadParameterError, PlanChangedError
from app.graph.hub_link import IS_THERE_S, MAX_REPORTS
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
from tests.support.hand_clock import HandClock

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"


def test_shares_that_do_not_sum_to_100_are_refused_with_their_sum() -> None:
    with pytest.raises(
        BadParameterError, match=r"sum to 97, not to 100 \(.*95, .*2\): 3 are missing"
    ):
        Split({A: 95, B: 2})
    with pytest.raises(BadParameterError, match=r"sum to 105, not to 100 .*: 5 more than 100"):
        Split({A: 95, B: 10})
    with pytest.raises(BadParameterError, match="sum to 0, not to 100"):
        Split({})
    with pytest.raises(BadParameterError, match="is 105; give a percent"):
        Split({A: 105, B: -5})


def test_a_third_of_the_requests_each_is_a_split() -> None:
    assert Split({A: 100 / 3, B: 100 / 3, C: 100 / 3}).answering == (A, B, C)


def test_a_shadow_answers_nobody() -> None:
    with pytest.raises(BadParameterError, match="is the shadow and answers 5 %"):
        Split({A: 95, B: 5}, B)
    assert Split({A: 100, B: 0}, B).versions == (A, B)


def test_the_main_version_has_the_largest_share() -> None:
    assert Split({A: 5, B: 95}).main == B
    assert Split({A: 50, B: 50}).main == A
    assert Split({A: 100, B: 0}, C).versions == (A, B, C)


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
    assert Plan.first(Split({A: 100})).origin != Plan.first(Split({B: 100})).origin
    assert (
        Plan.first(Split({A: 100})).origin
        == Plan.first(Split({A: 100.0})).changed(Split({B: 100})).origin
    )


def test_a_plan_has_the_same_order_in_every_process() -> None:
    plan = Plan.first(Split({A: 100.0}, B)).changed(Split({A: 95.0, B: 5.0}))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.order == plan.order
    assert "0x" not in plan.order[1]  # no address


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "send"),
        ({}, "send"),
        ({"shares": {A: "95"}}, "is no number"),
        ({"shares": {A: True}}, "is no number"),
        ({"shares": {A: 100}, "shadow": 3}, "shadow is not a string"),
    ],
)
def test_another_form_is_refused(content: object, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        Split.of(content)


FIRST = Plan.first(Split({A: 100.0}, B))
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


def test_a_gateway_gets_the_newest_plan(book: TrafficBook) -> None:
    assert book.change(Split({A: 95.0, B: 5.0}), None) == 1
    plan = book.report("g", FIRST, NO_FIGURES)
    assert plan is not None
    assert plan.split == Split({A: 95.0, B: 5.0})
    assert book.revisions() == [0]
    book.report("g", plan, NO_FIGURES)
    assert book.revisions() == [1]


def test_a_book_that_begins_anew_takes_the_gateways_plan(book: TrafficBook) -> None:
    newer = FIRST.changed(Split({A: 95.0, B: 5.0})).changed(Split({B: 100.0}))
    book.report("g", newer, NO_FIGURES)
    assert book.facts == newer
    assert book.report("late", FIRST, NO_FIGURES) == newer


def test_two_plans_of_one_revision_are_settled_alike_whoever_reports_first(clock):
    """A book began anew and made a plan before it heard of the Gateways'."""
    plans = [FIRST.changed(Split(shares)) for shares in ({A: 95.0, B: 5.0}, {A: 60.0, B: 40.0})]
    taken = []
    for reported in (plans, plans[::-1]):
        book = TrafficBook(FIRST, clock)
        for number, plan in enumerate(reported):
            book.report(f"g{number}", plan, NO_FIGURES)
        taken.append(book.facts)
    assert taken[0] == taken[1]
    assert taken[0] in plans


def test_the_plan_of_a_service_that_is_being_replaced_is_not_taken(book: TrafficBook) -> None:
    others = Plan.first(Split({B: 100.0})).changed(Split({A: 50.0, B: 50.0}))
    assert book.report("old", others, NO_FIGURES) is None
    assert book.facts == FIRST
    assert book.revisions() == []


def test_a_change_from_an_old_plan_is_refused(book: TrafficBook) -> None:
    book.change(Split({A: 95.0, B: 5.0}), 0)
    with pytest.raises(PlanChangedError, match="at revision 1, and yours was made from 0"):
        book.change(Split({B: 100.0}), 0)
    assert book.facts.revision == 1


def test_rollback_makes_the_split_before_the_newest(book: TrafficBook) -> None:
    book.change(Split({B: 100.0}), None)
    assert book.change(None, 1) == 2
    assert book.facts.split == FIRST.split


def test_a_silent_gateway_is_not_waited_for_and_its_figures_stay(book, clock):
    book.report("gone", FIRST, answered(3))
    clock.now += IS_THERE_S
    book.report("here", FIRST, answered(4))
    assert book.revisions() == [0]
    assert book.status().figures.versions[A].answered == 7


def test_a_gateways_figures_count_once(book: TrafficBook) -> None:
    for number in (3, 5):
        book.report("g", FIRST, answered(number))
    assert book.status().figures.versions[A].answered == 5


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


def test_however_many_gateways_report_their_figures_count_once(book, clock):
    for second in range(1, 100):
        for number in range(100):
            book.report(f"g{number}", FIRST, answered(second))
        clock.now += 1.0
    assert book.status().figures.versions[A].answered == 100 * 99
    assert len(book.revisions()) == 100


NUM = 20_000
KEYS = [sticky_key(None, b"photo %d" % number) for number in range(NUM)]


def keys_of(name: str, shares: dict[str, float]) -> set[bytes]:
    return {key for key in KEYS if chosen(key, shares) == name}


@pytest.mark.parametrize("share", [1, 5, 50])
def test_a_version_is_chosen_as_often_as_its_share_says(share: float) -> None:
    number = len(keys_of(B, {A: 100 - share, B: share}))
    assert number == pytest.approx(NUM * share / 100, abs=5 * (NUM * share / 100) ** 0.5)


def test_a_version_whose_share_grows_keeps_its_photos() -> None:
    before, after = keys_of(B, {A: 95, B: 5}), keys_of(B, {A: 90, B: 10})
    assert before < after
    assert keys_of(B, {B: 10, A: 90}) == after  # in whatever order they are named


def test_it_keeps_them_with_three_versions_too() -> None:
    before, after = {A: 90.0, B: 5.0, C: 5.0}, {A: 85.0, B: 10.0, C: 5.0}
    assert keys_of(B, before) < keys_of(B, after)


def test_without_a_share_a_version_is_never_chosen() -> None:
    assert keys_of(B, {A: 100, B: 0}) == set()
    assert len(keys_of(B, {A: 0, B: 100})) == NUM


def test_the_header_decides_where_there_is_a_value() -> None:
    assert sticky_key("anna", b"one") == sticky_key("anna", b"other")
    assert sticky_key("anna", b"one") != sticky_key("ben", b"one")
    assert sticky_key(None, b"one") != sticky_key(None, b"other")


def test_photos_that_begin_alike_differ_by_length() -> None:
    photo = bytes(HASHED_BYTES)
    assert sticky_key(None, photo + b"a") != sticky_key(None, photo)


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
