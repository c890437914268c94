"""The book: the newest plan wins, whoever knows it; figures are those of all Gateways."""

import pytest

from app.calls.hub_link import IS_THERE_S, MAX_REPORTS
from app.errors import PlanChangedError
from app.traffic.book import TrafficBook
from app.traffic.comparison import Figures
from app.traffic.plan import Plan, Split
from tests.support.hand_clock import HandClock

A, B = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb"
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


def test_two_plans_of_one_revision_are_settled_alike_whoever_reports_first(
    clock: HandClock,
) -> None:
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


def test_a_silent_gateway_is_not_waited_for_and_its_figures_stay(
    book: TrafficBook, clock: HandClock
) -> None:
    book.report("gone", FIRST, answered(3))
    clock.now += IS_THERE_S
    book.report("here", FIRST, answered(4))
    assert book.revisions() == [0]
    assert book.status().figures.versions[A].answered == 7


def test_a_gateways_figures_count_once(book: TrafficBook) -> None:
    for number in (3, 5):
        book.report("g", FIRST, answered(number))
    assert book.status().figures.versions[A].answered == 5


def test_reports_of_gateways_that_are_gone_are_added_up_and_nothing_is_lost(
    book: TrafficBook, clock: HandClock
) -> None:
    for number in range(2 * MAX_REPORTS):
        book.report(f"g{number}", FIRST, answered(1))
        clock.now += 1.0
    assert len(book._reports) == MAX_REPORTS
    assert book.status().figures.versions[A].answered == 2 * MAX_REPORTS


def test_gateways_that_come_back_after_a_minute_count_once(
    book: TrafficBook, clock: HandClock
) -> None:
    """They could not reach the deployment, which went on."""
    for number in (10, 11):
        clock.now += 61.0
        for gateway in ("g1", "g2", "g3"):
            book.report(gateway, FIRST, answered(number))
    assert book.status().figures.versions[A].answered == 3 * 11


def test_however_many_gateways_report_their_figures_count_once(
    book: TrafficBook, clock: HandClock
) -> None:
    for second in range(1, 100):
        for number in range(100):
            book.report(f"g{number}", FIRST, answered(second))
        clock.now += 1.0
    assert book.status().figures.versions[A].answered == 100 * 99
    assert len(book.revisions()) == 100
