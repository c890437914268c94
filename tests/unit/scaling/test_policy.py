"""The autoscaling policy's promises, whatever the stages, the load and the noise."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.scaling.demand import ENOUGH_ARRIVALS, WINDOWS_S
from app.scaling.policy import Demand, ScalingOptions, StageState, State, decide

OPTIONS = ScalingOptions()
WINDOW_S = 5.0
TICK_S = 0.5
ENSEMBLE = {
    "Gateway": StageState(6.2, 1, 1, 1000, 1),
    "Decoder": StageState(5.1, 2, 1, 1000, 1),
    "resnet50": StageState(18.9, 4, 1, 1000, 1),
    "densenet169": StageState(18.4, 4, 1, 1000, 1),
}


def decided(stages, rate, state=None, now=0.0, backlog=0.0, window_s=WINDOW_S):
    return decide(stages, Demand(rate, window_s, backlog), state or State(), now, OPTIONS)


def at(stages, targets):
    """The stages when what was decided has been asked for."""
    return {name: replace(stage, target=targets[name]) for name, stage in stages.items()}


def played(stages, rates, window_s=WINDOW_S) -> Iterator[dict[str, int]]:
    """Yield the targets of one decision after the other, a tick apart."""
    state = State()
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
    return StageState(cpu_ms, draw(st.floats(0.5, 64)), low, high, draw(st.integers(low, high)))


STAGES = st.dictionaries(st.sampled_from("abcdef"), any_stage(), min_size=1)
RATES = st.floats(0, 5000)
BACKLOGS = st.floats(0, 5000)
HISTORIES = st.lists(RATES, max_size=5)


def after(stages, history):
    state = State()
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
    assert again.targets == first.targets
    assert again.state == first.state


@given(st.floats(5, 3000))
def test_every_stage_gets_cores_in_the_ratio_of_its_cost(rate):
    targets = decided(ENSEMBLE, rate).targets
    for name, stage in ENSEMBLE.items():
        exact = rate * stage.cpu_ms / (stage.cores * 1e3 * OPTIONS.target_utilization)
        assert exact - 1e-6 <= targets[name] < exact + 1 + 1e-6


def test_a_fused_graph_is_sized_by_its_sum():
    cost = sum(stage.cpu_ms for stage in ENSEMBLE.values())
    one = {"Gateway": StageState(cost, 4, 1, 100, 1)}
    assert decided(one, 400).targets == {"Gateway": math.ceil(400 * cost / 4000 / 0.7)}


def test_a_stage_at_its_limit_bounds_what_the_others_get():
    stages = ENSEMBLE | {"densenet169": replace(ENSEMBLE["densenet169"], max_replicas=1)}
    targets = decided(stages, 5000).targets
    bound = stages["densenet169"].capacity(1)
    assert targets == decided(ENSEMBLE, bound).targets | {"densenet169": 1}


def poisson_rates(rate: float, window_s: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of the last window over its length, at every tick."""
    rng = np.random.default_rng(seed)
    per_tick = rng.poisson(rate * TICK_S, int((seconds + window_s) / TICK_S))
    ticks = int(window_s / TICK_S)
    return list(np.convolve(per_tick, np.ones(ticks), "valid") / window_s)


@pytest.mark.parametrize("rate", [10.0, 20.0, 50.0, 111.0, 200.0, 444.0, 800.0])
@pytest.mark.parametrize("seed", range(3))
def test_poisson_noise_moves_nothing_once_it_has_settled(rate, seed):
    """Ten minutes at one rate, wherever it lies between two numbers of replicas."""
    window_s = next(w for w in WINDOWS_S if rate * w >= ENOUGH_ARRIVALS)
    rates = poisson_rates(rate, window_s, 600, seed)
    slow = {name: replace(stage, cores=0.5) for name, stage in ENSEMBLE.items()}
    targets = list(played(slow, rates, window_s=window_s))
    settled = targets[int(60 / TICK_S) :]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert changes <= 1


def test_costs_that_waver_move_nothing():
    rng, state, seen = np.random.default_rng(0), State(), set()
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


def test_a_peak_in_between_starts_the_wait_anew():
    ticks = int(OPTIONS.scale_down_after_s / TICK_S)
    rates = [800] + [50] * (ticks // 2) + [800] + [50] * (ticks - 2)
    assert list(played(ENSEMBLE, rates))[-1] == decided(ENSEMBLE, 800).targets


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
        ScalingOptions.model_validate(wrong)
