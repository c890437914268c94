"""Rates, backlog and costs from replicas' reports, as they come and go."""

import pytest

from app.scaling.demand import StageMeter, demand
from app.scaling.usage import FIGURES, Usage
from tests.support.drawn_reports import reports


def metered(*replicas):
    meter = StageMeter()
    meter.update(dict(enumerate(replicas)), now=50.0)
    return meter


def test_rates_and_backlogs_of_replicas_add_up_whatever_their_clocks_say():
    meter = metered(reports(100, waiting=3), reports(50, waiting=4, clock=-7e6))
    found = meter.demand()
    assert found.rate == pytest.approx(150)
    assert found.backlog == 7


@pytest.mark.parametrize(("rate", "window_s"), [(400, 5), (50, 10), (25, 20), (3, 40)])
def test_few_arrivals_are_counted_for_longer(rate, window_s):
    found = metered(reports(rate)).demand()
    assert found.window_s == window_s
    assert found.rate == pytest.approx(rate)


def test_a_step_shows_within_seconds():
    before = reports(10, 0, 50)
    after = reports(300, 50, 54, at_start=before[-1].images_arrived)
    meter = metered(before)
    assert meter.demand().rate == pytest.approx(10)
    meter.update({0: after}, now=54.0)
    assert meter.demand().rate == pytest.approx((4 * 300 + 10) / 5)


def test_a_few_arrivals_are_enough_to_see_that_most_are_gone():
    before = reports(100, 0, 50)
    meter = metered(before)
    meter.update({0: reports(3, 50, 56, at_start=before[-1].images_arrived)}, now=56.0)
    assert meter.demand().rate == pytest.approx(3)
    assert meter.demand().window_s == 5


def test_reports_that_come_again_count_once_and_old_ones_are_forgotten():
    meter = StageMeter()
    for now in range(1, 200):
        since = max(0, now - 10)
        meter.update({0: reports(100, since, now, at_start=100.0 * since)}, now)
    assert meter.demand().rate == pytest.approx(100)
    assert len(meter._of[0].kept) <= 42


def test_a_replica_that_is_gone_counts_no_more():
    meter = metered(reports(100), reports(60))
    meter.update({1: reports(60)}, now=51.0)
    assert meter.demand().rate == pytest.approx(60)


@pytest.mark.parametrize("rate", [12.0, 30.0, 80.0, 400.0])
@pytest.mark.parametrize("for_s", [2, 4, 9, 18, 30])
def test_replicas_that_become_ready_do_not_add_to_what_arrives(rate, for_s):
    """One did everything for a minute; then three share it, each with a clock of its own."""
    before = reports(rate, 0, 60)
    share = reports(rate / 3, 60, 60 + for_s, at_start=before[-1].images_arrived)
    new = [reports(rate / 3, 0, for_s, clock=clock) for clock in (-7e6, 3e6)]
    meter = StageMeter()
    meter.update({0: before}, now=60.0)
    meter.update({0: before + share, **dict(enumerate(new, start=1))}, now=60.0 + for_s)
    assert meter.demand().rate == pytest.approx(rate)


def test_a_hung_replica_counts_no_more():
    hung, other = reports(100, waiting=70), reports(60, waiting=3)
    meter = metered(hung, other)
    assert meter.demand().rate == pytest.approx(160)
    for now in range(51, 60):  # what was last known of it comes again and again
        meter.update({0: hung, 1: reports(60, 0, now, waiting=3)}, now)
    assert meter.demand().rate == pytest.approx(60)
    assert meter.demand().backlog == 3
    meter.update({0: reports(100, 0, 60), 1: reports(60, 0, 60)}, now=60.0)
    assert meter.demand().rate == pytest.approx(160)


def test_when_all_hang_nothing_is_known():
    meter = metered(reports(100))
    meter.update({0: reports(100)}, now=56.0)
    assert demand({"Gateway": meter}) is None


def test_replicas_that_report_rarely_do_not_hang():
    meter = metered(reports(100))
    meter.update({0: reports(100)}, now=60.0, interval_s=10.0)  # Serve's default
    assert meter.demand().rate == pytest.approx(100)
    meter.update({0: reports(100)}, now=81.0, interval_s=10.0)
    assert not meter.is_measured


def test_two_reports_of_one_time_are_one():
    start, *others = reports(100)
    meter = metered([start, start, *others, others[-1]])
    assert meter.demand().rate == pytest.approx(100)
    meter = metered([start, start])
    assert not meter.is_measured


def test_a_clock_that_is_set_back_begins_anew():
    meter = metered(reports(100))
    meter.update({0: reports(60, 0, 20, clock=-3600.0, at_start=5000.0)}, now=71.0)
    assert meter.demand().rate == pytest.approx(60)


def test_nothing_is_told_before_there_are_two_reports():
    meter = metered(reports(10, 0, 0))
    assert not meter.is_measured
    assert demand({"Gateway": meter, "Decoder": StageMeter()}) is None


def test_the_stage_that_sees_most_tells_the_demand():
    meters = {"Decoder": metered(reports(80)), "Gateway": metered(reports(120, waiting=9))}
    assert demand(meters).rate == pytest.approx(120)
    assert demand(meters).backlog == 9


def test_the_cost_of_an_image():
    meter = metered(reports(50, cpu_ms=20), reports(100, cpu_ms=14))
    assert meter.cpu_ms() == pytest.approx(16)


def test_an_idle_process_is_not_taken_for_a_dear_image():
    meter = metered(reports(1, cpu_ms=20, idle_ms=30))  # 50 CPU-ms an image, most of it Ray's
    assert meter.cpu_ms() is None
    assert meter.expected_cpu_ms() == 15


def test_what_was_measured_is_remembered_when_there_is_too_little_to_tell():
    before = reports(50, cpu_ms=22)
    meter = metered(before)
    assert meter.cpu_ms() == pytest.approx(22)
    meter.update({1: reports(1, cpu_ms=20, idle_ms=30)}, now=51.0)
    assert meter.cpu_ms() == pytest.approx(22)


def test_what_copies_for_a_shadow_used_is_no_cost_of_images() -> None:
    usage = Usage(4, 15.0, cpu_s=lambda: 1.25)
    usage.copied(200.0)
    usage.copied(50.0)
    assert usage.figures()["cpu_ms"] == 1000


def test_usage_counts_what_came_what_is_there_and_what_was_done():
    spent = iter([1.25])
    usage = Usage(4, 15.0, cpu_s=lambda: next(spent))
    usage.refused()
    with usage.under_way(3):
        pass
    with pytest.raises(ValueError, match="no"), usage.under_way(2):
        raise ValueError("no")
    with usage.under_way(5):
        figures = usage.figures()
    assert figures == {
        "images_arrived": 11,
        "images_done": 3,
        "images_waiting": 5,
        "cpu_ms": 1250,
        "cores": 4,
        "expected_cpu_ms": 15,
    }
    assert set(figures) == set(FIGURES)
    assert all(isinstance(value, float) for value in figures.values())  # else Serve drops them
