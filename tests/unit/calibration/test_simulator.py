"""The simulated service: against queueing theory, and its books balance whatever happens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bench.load import poisson_arrivals
from calibration.simulator import Service, SimStage, Simulation
from tests.support.scaled_simulation import (
    PolicyAutoscaler,
    ScaledService,
    ScaledSimulation,
    ScaledStage,
)

STEPS = (("Gateway",), ("Decoder",), ("one", "other"))


def service(**changes):
    stages = {
        "Gateway": ScaledStage(6, 1, 2, 1, 1, 16),
        "Decoder": ScaledStage(5, 2, 1, 1, 1, 8),
        "one": ScaledStage(20, 4, 1, 8, 1, 16),
        "other": ScaledStage(15, 4, 1, 8, 1, 16),
    }
    return ScaledService(stages, STEPS, **changes)


class Script:
    """Wants replicas at given ticks."""

    def __init__(self, wants):
        self._wants = dict(wants)

    def decide(self, now, running, targets):
        return self._wants.get(now, {})


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_with_even_times_waits_as_theory_says(busy):
    """M/D/1: the mean wait is rho s / 2 (1 - rho) (Pollaczek-Khinchine)."""
    alone = Service({"only": SimStage(10, 1)}, (("only",),), jitter=0)
    arrivals = poisson_arrivals(100 * busy, 600, seed=3).tolist()
    outcome = Simulation(alone).run(arrivals)
    waits = [latency - 0.010 for _, latency in outcome.answered]
    assert np.mean(waits) == pytest.approx(busy * 0.010 / (2 * (1 - busy)), rel=0.1)


def test_an_image_alone_takes_its_steps_one_after_the_other_and_the_slower_member():
    outcome = Simulation(service(jitter=0)).run([1.0])
    assert outcome.answered == [(1.0, pytest.approx(0.006 + 0.005 + 0.020))]


def test_more_than_fits_is_refused_and_what_waits_too_long_is_dropped():
    arrivals = poisson_arrivals(1000, 30, seed=1).tolist()
    outcome = Simulation(service(max_under_way=1500, timeout_s=5)).run(arrivals)
    assert outcome.refused
    assert outcome.late
    # No answer is later than its time and what it takes once it has its turn at the last stage.
    assert max(latency for _, latency in outcome.answered) < 5 + 8 * 0.020 * 2


CHANGES = st.lists(
    st.tuples(
        st.sampled_from([0.5 * n for n in range(1, 40)]),
        st.dictionaries(st.sampled_from(["Gateway", "Decoder", "one", "other"]), st.integers(1, 4)),
    )
)


@settings(max_examples=30, deadline=None)
@given(CHANGES, st.integers(0, 3), st.sampled_from([40.0, 300.0]))
def test_every_image_is_answered_refused_or_late_however_replicas_come_and_go(wants, seed, rate):
    arrivals = poisson_arrivals(rate, 20, seed).tolist()
    outcome = ScaledSimulation(service(start_s=3), Script(wants), seed).run(arrivals, 20)
    ended = [at for at, _ in outcome.answered] + outcome.refused + outcome.late
    assert sorted(ended) == arrivals


def test_scaling_down_loses_nothing_while_there_is_room():
    wants = {5.0: dict.fromkeys(("Gateway", "Decoder", "one", "other"), 3), 15.0: {"one": 1}}
    arrivals = poisson_arrivals(100, 30, seed=2).tolist()
    outcome = ScaledSimulation(service(start_s=2), Script(wants)).run(arrivals, 30)
    assert len(outcome.answered) == len(arrivals)
    assert outcome.replicas["one"][10] == 3
    assert outcome.replicas["one"][-1] == 1


def test_the_same_seed_plays_the_same():
    arrivals = poisson_arrivals(100, 20, seed=2).tolist()
    first, second = (
        ScaledSimulation(service(), PolicyAutoscaler(service()), 7).run(arrivals, 20) for _ in "ab"
    )
    assert first == second


def test_the_policy_follows_a_step_within_15_s_and_comes_back():
    arrivals = [
        *poisson_arrivals(40, 60, seed=1),
        *(60 + poisson_arrivals(300, 120, seed=2)),
        *(180 + poisson_arrivals(40, 240, seed=3)),
    ]
    outcome = ScaledSimulation(service(), PolicyAutoscaler(service())).run(arrivals, 420)
    before, after, end = ({n: of[at] for n, of in outcome.targets.items()} for at in (58, 74, -1))
    assert all(after[name] > before[name] for name in after)
    carried = {"Gateway": 1000 / 6, "Decoder": 2000 / 5, "one": 4000 / 20, "other": 4000 / 15}
    assert all(after[name] * rate > 300 for name, rate in carried.items())
    assert end == dict.fromkeys(end, 1)
    assert not outcome.late
