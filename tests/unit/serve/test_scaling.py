"""The autoscaling policy: what it measures and decides, and how Serve calls it."""

import inspect
import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from app.launch.config import POLICY
from app.queueing.admission import FIGURES, Usage, UsageReport
from app.serve import scaling
from tests.support.drawn_reports import reports


def metered(*replicas):
    meter = scaling.StageMeter()
    meter.update(dict(enumerate(replicas)), now=50.0)
    return meter


def rate_of(meter, reports_now=None, now=0.0, **interval):
    """Return the rate, after more reports where there are some."""
    if reports_now is not None:
        meter.update(reports_now, now=now, **interval)
    return pytest.approx(meter.demand().rate)


def test_rates_and_backlogs_of_replicas_add_up_whatever_their_clocks_say():
    gateway = metered(reports(100, waiting=3), reports(50, waiting=4, clock=-7e6))
    for demanded in (
        gateway.demand(),
        scaling.demand({"Decoder": metered(reports(80)), "Gateway": gateway}),
    ):
        assert demanded.rate == pytest.approx(150)  # the stage that sees most tells it
        assert demanded.backlog == 7


@pytest.mark.parametrize(("rate", "window_s"), [(400, 5), (50, 10), (25, 20), (3, 40)])
def test_few_arrivals_are_counted_for_longer(rate, window_s):
    found = metered(reports(rate)).demand()
    assert (found.window_s, found.rate) == (window_s, pytest.approx(rate))


def test_a_step_shows_within_seconds():
    before = reports(10, 0, 50)
    after = reports(300, 50, 54, at_start=before[-1].images_arrived)
    meter = metered(before)
    assert (rate_of(meter), rate_of(meter, {0: after}, now=54.0)) == (10, (4 * 300 + 10) / 5)


def test_a_few_arrivals_are_enough_to_see_that_most_are_gone():
    before = reports(100, 0, 50)
    after = reports(3, 50, 56, at_start=before[-1].images_arrived)
    meter = metered(before)
    assert (rate_of(meter, {0: after}, now=56.0), meter.demand().window_s) == (3, 5)


def test_reports_that_come_again_count_once_and_old_ones_are_forgotten():
    meter = scaling.StageMeter()
    for now in range(1, 200):
        since = max(0, now - 10)
        meter.update({0: reports(100, since, now, at_start=100.0 * since)}, now)
    assert meter.demand().rate == pytest.approx(100)
    assert len(meter._of[0].kept) <= 82


def test_a_replica_that_is_gone_counts_no_more():
    assert rate_of(metered(reports(100), reports(60)), {1: reports(60)}, now=51.0) == 60


def test_two_reports_of_one_time_are_one_and_a_clock_that_is_set_back_begins_anew():
    start, *others = reports(100)
    assert rate_of(metered([start, start, *others, others[-1]])) == 100
    assert not metered([start, start]).is_measured
    anew = reports(60, 0, 20, clock=-3600.0, at_start=5000.0)
    assert rate_of(metered([start, *others]), {0: anew}, now=71.0) == 60


@pytest.mark.parametrize("rate", [12.0, 30.0, 80.0, 400.0])
@pytest.mark.parametrize("for_s", [2, 4, 9, 18, 30])
def test_replicas_that_become_ready_do_not_add_to_what_arrives(rate, for_s):
    """One did everything for a minute; then three share it, each with a clock of its own."""
    before = reports(rate, 0, 60)
    share = reports(rate / 3, 60, 60 + for_s, at_start=before[-1].images_arrived)
    new = [reports(rate / 3, 0, for_s, clock=clock) for clock in (-7e6, 3e6)]
    meter = scaling.StageMeter()
    meter.update({0: before}, now=60.0)
    meter.update({0: before + share, **dict(enumerate(new, start=1))}, now=60.0 + for_s)
    assert meter.demand().rate == pytest.approx(rate)


def test_a_hung_replica_counts_no_more():
    hung, other = reports(100, waiting=70), reports(60, waiting=3)
    meter = metered(hung, other)
    assert rate_of(meter) == 160
    for now in range(51, 60):  # what was last known of it comes again and again
        meter.update({0: hung, 1: reports(60, 0, now, waiting=3)}, now)
    assert (rate_of(meter), meter.demand().backlog) == (60, 3)
    assert rate_of(meter, {0: reports(100, 0, 60), 1: reports(60, 0, 60)}, now=60.0) == 160


def test_the_longest_window_is_whole_where_it_ends_before_the_newest_report():
    """It ends where a silent replica was last heard; Serve's default is a report each 10 s."""
    meter = metered(reports(10, 0, 100)[::10])
    assert all(meter._of[0].span(40.0, before_s).is_whole for before_s in (0, 10, 30))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_requests_that_others_get_in_place_of_a_hung_replica_are_counted_once(num_replicas):
    """300 images/s throughout: its share goes to the others while its last rate still counts."""
    policy, targets = scaling.EnsemblePolicy(), set()
    sent: list[list[UsageReport]] = [[] for _ in range(num_replicas)]
    for now in range(60):
        alive = sent if now < 40 else sent[1:]
        for of in alive:
            before = of[-1].images_arrived if of else 0
            of.append(reports(300 / len(alive), now, now + 1, cpu_ms=27, at_start=before)[-1])
        targets |= set(asked(policy, context("Gateway", *sent, target=3, now=now)).values())
    assert targets == {3}


def test_replicas_that_report_rarely_do_not_hang():
    meter = metered(reports(100))
    assert rate_of(meter, {0: reports(100)}, now=60.0, interval_s=10.0) == 100  # Serve's default
    meter.update({0: reports(100)}, now=81.0, interval_s=10.0)
    assert scaling.demand({"Gateway": meter}) is None  # all hang: nothing is known


def test_nothing_is_told_before_there_are_two_reports():
    meter = metered(reports(10, 0, 0))
    assert not meter.is_measured
    assert scaling.demand({"Gateway": meter, "Decoder": scaling.StageMeter()}) is None


def test_the_cost_of_an_image_is_remembered_when_there_is_too_little_to_tell():
    idle = reports(1, cpu_ms=20, idle_ms=30)  # 50 CPU-ms an image, most of it Ray's
    unknown = metered(idle)
    assert (unknown.cpu_ms(), unknown.expected_cpu_ms()) == (None, 15)
    meter = metered(reports(50, cpu_ms=20), reports(100, cpu_ms=14))
    assert meter.cpu_ms() == pytest.approx(16)
    meter.update({2: idle}, now=51.0)
    assert meter.cpu_ms() == pytest.approx(16)


def test_usage_counts_what_came_what_is_there_and_what_was_done():
    usage = Usage(4, 15.0, cpu_s=lambda: 1.25)
    usage.refused()
    with usage.under_way(3):
        pass
    with pytest.raises(ValueError, match="no"), usage.under_way(2):
        raise ValueError("no")
    for cpu_ms in (200.0, 50.0):
        usage.copied(cpu_ms)  # for a shadow: no cost of images
    with usage.under_way(5):
        figures = usage.figures()
    counts = {"images_arrived": 11, "images_done": 3, "images_waiting": 5}
    assert figures == counts | {"cpu_ms": 1000, "cores": 4, "expected_cpu_ms": 15}
    assert set(figures) == set(FIGURES)
    assert all(isinstance(value, float) for value in figures.values())  # else Serve drops them


OPTIONS = scaling.ScalingOptions()
WINDOW_S = 5.0
TICK_S = 0.5
ENSEMBLE = {
    "Gateway": scaling.StageState(6.2, 1, 1, 1000, 1),
    "Decoder": scaling.StageState(5.1, 2, 1, 1000, 1),
    "resnet50": scaling.StageState(18.9, 4, 1, 1000, 1),
    "densenet169": scaling.StageState(18.4, 4, 1, 1000, 1),
}


def decided(stages, rate, state=None, now=0.0, backlog=0.0, window_s=WINDOW_S):
    return scaling.decide(
        stages, scaling.Demand(rate, window_s, backlog), state or scaling.State(), now, OPTIONS
    )


def at(stages, targets):
    """The stages when what was decided has been asked for."""
    return {name: replace(stage, target=targets[name]) for name, stage in stages.items()}


def played(stages, rates, window_s=WINDOW_S) -> Iterator[dict[str, int]]:
    """Yield the targets of one decision after the other, a tick apart."""
    state = scaling.State()
    for step, rate in enumerate(rates):
        decision = decided(stages, rate, state, step * TICK_S, window_s=window_s)
        state, stages = decision.state, at(stages, decision.targets)
        yield dict(decision.targets)


@st.composite
def limits(draw):
    low = draw(st.integers(1, 5))
    return low, low + draw(st.integers(0, 60))


@st.composite
def any_stage(draw):
    low, high = draw(limits())
    cpu_ms = draw(st.floats(0.1, 500))
    return scaling.StageState(
        cpu_ms, draw(st.floats(0.5, 64)), low, high, draw(st.integers(low, high))
    )


STAGES = st.dictionaries(st.sampled_from("abcdef"), any_stage(), min_size=1)
RATES = st.floats(0, 5000)
BACKLOGS = st.floats(0, 5000)
HISTORIES = st.lists(RATES, max_size=5)


def after(stages, history):
    state = scaling.State()
    for step, rate in enumerate(history):
        state = decided(stages, rate, state, step * TICK_S).state
    return state


@given(STAGES, HISTORIES, RATES, BACKLOGS)
def test_the_limits_are_kept(stages, history, rate, backlog):
    targets = decided(stages, rate, after(stages, history), 10, backlog).targets
    assert set(targets) == set(stages)
    for name, stage in stages.items():
        assert stage.min_replicas <= targets[name] <= stage.max_replicas


@given(STAGES, HISTORIES, RATES, RATES)
def test_a_higher_rate_never_gets_less(stages, history, one, other):
    """Without a backlog: of more arrivals more are usually under way, and less of it is backlog."""
    state = after(stages, history)
    low, high = sorted((one, other))
    less, more = decided(stages, low, state, 10).targets, decided(stages, high, state, 10).targets
    assert all(less[name] <= more[name] for name in stages)


@given(STAGES, HISTORIES, RATES, BACKLOGS)
def test_never_below_what_the_rate_keeps_busy_unless_a_limit_is_in_the_way(
    stages, history, rate, backlog
):
    targets = decided(stages, rate, after(stages, history), 10, backlog).targets
    for name, stage in stages.items():
        is_at_its_limit = targets[name] == stage.max_replicas
        another_is = any(s.capacity(s.max_replicas) < rate for s in stages.values())
        assert stage.capacity(targets[name]) >= rate * (1 - 1e-6) or is_at_its_limit or another_is


@given(STAGES, HISTORIES, RATES, BACKLOGS)
def test_the_same_again_decides_the_same(stages, history, rate, backlog):
    first = decided(stages, rate, after(stages, history), 10, backlog)
    again = decided(at(stages, first.targets), rate, first.state, 10, backlog)
    assert (again.targets, again.state) == (first.targets, first.state)


@given(st.floats(5, 3000))
def test_every_stage_gets_cores_in_the_ratio_of_its_cost(rate):
    targets = decided(ENSEMBLE, rate).targets
    for name, stage in ENSEMBLE.items():
        exact = rate * stage.cpu_ms / (stage.cores * 1e3 * OPTIONS.target_utilization)
        assert exact - 1e-6 <= targets[name] < exact + 1 + 1e-6


def test_a_fused_graph_is_sized_by_its_sum():
    cost = sum(stage.cpu_ms for stage in ENSEMBLE.values())
    fused = {"Gateway": scaling.StageState(cost, 4, 1, 100, 1)}
    assert decided(fused, 400).targets == {"Gateway": math.ceil(400 * cost / 4000 / 0.7)}


def test_a_stage_at_its_limit_bounds_what_the_others_get():
    stages = ENSEMBLE | {"densenet169": replace(ENSEMBLE["densenet169"], max_replicas=1)}
    bound = stages["densenet169"].capacity(1)
    assert decided(stages, 5000).targets == decided(ENSEMBLE, bound).targets | {"densenet169": 1}


@pytest.mark.parametrize("rate", [10.0, 20.0, 50.0, 111.0, 200.0, 444.0, 800.0])
@pytest.mark.parametrize("seed", range(3))
def test_poisson_noise_moves_nothing_once_it_has_settled(rate, seed):
    """Ten minutes at one rate, wherever it lies between two numbers of replicas."""
    window_s = next(w for w in scaling.WINDOWS_S if rate * w >= scaling.ENOUGH_ARRIVALS)
    ticks = int(window_s / TICK_S)
    arrivals = np.random.default_rng(seed).poisson(rate * TICK_S, int(600 / TICK_S) + ticks)
    rates = np.convolve(arrivals, np.ones(ticks), "valid") / window_s
    slow = {name: replace(stage, cores=0.5) for name, stage in ENSEMBLE.items()}
    settled = list(played(slow, rates.tolist(), window_s=window_s))[int(60 / TICK_S) :]
    assert sum(a != b for a, b in itertools.pairwise(settled)) <= 1


def test_costs_that_waver_move_nothing():
    rng, state, seen = np.random.default_rng(0), scaling.State(), set()
    for step in range(1000):
        wavering = {
            name: replace(stage, cpu_ms=stage.cpu_ms * rng.uniform(0.93, 1.07))
            for name, stage in ENSEMBLE.items()
        }
        decision = decided(wavering, 300, state, step * TICK_S)
        state = decision.state
        seen.add(tuple(decision.targets.values()))
    assert len(seen) == 1


@given(st.floats(1, 200), st.floats(1.5, 20))
def test_a_step_is_followed_at_once(rate, factor):
    *_, before, after_step = played(ENSEMBLE, [rate, rate, rate * factor])
    assert after_step == decided(at(ENSEMBLE, before), rate * factor).targets


def test_down_only_when_nothing_more_was_needed_for_long():
    high, low = decided(ENSEMBLE, 800).targets, decided(ENSEMBLE, 50).targets
    ticks = int(OPTIONS.scale_down_after_s / TICK_S)
    targets = list(played(ENSEMBLE, [800] + [50] * (ticks + 10)))
    assert targets[ticks - 1] == high
    # Down to the upper confidence limit of the low rate: here one replica more at the most.
    assert all(low[name] <= targets[-1][name] <= low[name] + 1 for name in low)
    peak_between = [800] + [50] * (ticks // 2) + [800] + [50] * (ticks - 2)
    assert list(played(ENSEMBLE, peak_between))[-1] == high  # the wait starts anew


def test_a_new_policy_takes_nothing_away_at_once():
    """The controller started anew, and what was decided before is forgotten."""
    stages = at(ENSEMBLE, dict.fromkeys(ENSEMBLE, 9))
    targets = list(played(stages, [50] * 300))
    assert targets[0] == dict.fromkeys(ENSEMBLE, 9)
    assert targets[-1] == decided(ENSEMBLE, 50).targets


def test_a_backlog_asks_for_more_and_what_is_usually_under_way_does_not():
    calm = decided(ENSEMBLE, 200).targets
    assert decided(ENSEMBLE, 200, backlog=100).targets == calm
    behind = decided(ENSEMBLE, 200, backlog=1100).targets
    assert behind == decided(ENSEMBLE, 200 + 1000 / OPTIONS.drain_s).targets


@pytest.mark.parametrize(
    "wrong", [{"target_utilization": 1.5}, {"drain": 3}, {"cpu_ms": {"Decoder": 0}}]
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        scaling.ScalingOptions.model_validate(wrong)


# The policy in Serve's hands: its contexts in, its decisions out, and never an exception.


def series(replicas):
    """Replicas' reports as Serve's controller holds them."""
    return {
        name: {
            replica: [TimeStampedValue(report.at, getattr(report, name)) for report in found]
            for replica, found in replicas.items()
        }
        for name in FIGURES
    }


def context(name, *replicas, target=1, now=0.0, raw_metrics=None, limits=(1, 20)):
    deployment = DeploymentID(name=name, app_name="tandem")
    of = {ReplicaID(unique_id=str(i), deployment_id=deployment): r for i, r in enumerate(replicas)}
    config = AutoscalingConfig(
        min_replicas=limits[0], max_replicas=limits[1], upscale_delay_s=0, downscale_delay_s=0
    )
    only_in_2_59 = {"total_pending_async_requests"} & {
        *inspect.signature(AutoscalingContext).parameters
    }
    unknown = ("aggregated_metrics", "last_scale_up_time", "last_scale_down_time")
    zero = ("total_num_requests", "total_queued_requests", *only_in_2_59)
    unused: dict[str, Any] = dict.fromkeys(unknown) | dict.fromkeys(zero, 0)
    return AutoscalingContext(
        **unused,
        deployment_id=deployment,
        deployment_name=name,
        app_name="tandem",
        current_num_replicas=len(replicas) or target,
        target_num_replicas=target,
        running_replicas=list(of),
        raw_metrics=lambda: series(of) if raw_metrics is None else raw_metrics,
        capacity_adjusted_min_replicas=limits[0],
        capacity_adjusted_max_replicas=limits[1],
        policy_state={},
        current_time=now,
        config=config,
    )


def asked(policy, *contexts):
    decisions, _ = policy({c.deployment_id: c for c in contexts})
    return {deployment.name: replicas for deployment, replicas in decisions.items()}


def test_all_stages_follow_one_rate():
    found = asked(
        scaling.EnsemblePolicy(),
        context("Gateway", reports(400, cpu_ms=5), reports(200, cpu_ms=5)),
        context("resnet50", reports(500, cpu_ms=20)),  # behind: it does not see all of it yet
        context("densenet169", reports(500, cpu_ms=10)),
    )
    # 600/s, each replica 4 cores at 0.7: 2800 CPU-ms a second
    assert found == {"Gateway": 2, "resnet50": 5, "densenet169": 3}


def test_what_is_given_or_expected_counts_until_it_is_measured():
    quiet = context("resnet50", reports(100, cpu_ms=0.0, idle_ms=10.0))
    assert asked(scaling.EnsemblePolicy(), quiet) == {"resnet50": 1}  # 15 CPU-ms
    assert asked(scaling.EnsemblePolicy(cpu_ms={"resnet50": 100}), quiet) == {"resnet50": 4}
    idle = context("resnet50", reports(0), limits=(0, 20))
    assert asked(scaling.EnsemblePolicy(), idle) == {"resnet50": 1}  # never nothing


def test_a_stage_that_was_taken_away_tells_nothing_any_more():
    policy = scaling.EnsemblePolicy(scale_down_after_s=1)
    one = context("resnet50", reports(50, cpu_ms=20), now=1)
    assert asked(policy, context("Gateway", reports(900, cpu_ms=2)), one)["resnet50"] == 7
    asked(policy, context("resnet50", reports(50, cpu_ms=20), now=2))
    assert asked(policy, context("resnet50", reports(50, cpu_ms=20), now=9)) == {"resnet50": 1}


def test_without_reports_everything_stays(caplog):
    assert asked(scaling.EnsemblePolicy(), context("Gateway"), context("resnet50", target=7)) == {}
    assert not caplog.records
    policy = scaling.EnsemblePolicy(drain=3)  # wrong kwargs are told, and nothing scales
    assert "drain" in caplog.text
    assert asked(policy, context("resnet50", reports(500))) == {}


def test_serve_can_import_it_pickle_it_and_make_it():
    """Through Serve's own wrapper the decision stands at once."""
    serves = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"drain_s": 3})
    made = cloudpickle.loads(serves.get_serialized_policy_def())(**serves.policy_kwargs)
    stage = context("resnet50", reports(500, cpu_ms=20))
    assert asked(made, stage) == {"resnet50": 4}
    assert asked(_apply_app_level_autoscaling_config(made), stage) == {"resnet50": 4}


def test_what_it_does_not_understand_changes_nothing_and_is_told_once_a_minute(caplog):
    policy = scaling.EnsemblePolicy()
    broken = {name: {"replica": ["no point"]} for name in FIGURES}
    for now, num_told in ((0.0, 1), (1.0, 1), (59.0, 1), (61.0, 2)):
        assert asked(policy, context("Gateway", now=now, raw_metrics=broken)) == {}
        assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == num_told


@pytest.mark.parametrize("missing", FIGURES)
def test_a_replica_of_an_older_version_is_left_out(missing):
    deployment = context("resnet50", reports(500, cpu_ms=20))
    metrics = {name: of for name, of in deployment.raw_metrics.items() if name != missing}
    assert asked(scaling.EnsemblePolicy(), context("resnet50", raw_metrics=metrics)) == {}
