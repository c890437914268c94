"""The simulated service: against queueing theory, and its books balance whatever happens."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bench.load import poisson_arrivals
from app.queueing.admission import UsageReport
from app.serve.scaling import ScalingOptions, StageMeter, StageState, State, decide, demand
from calibration.planning import Service, SimStage, Simulation

STEPS = (("Gateway",), ("Decoder",), ("one", "other"))
STAGES = {
    "Gateway": SimStage(6, 1, 2, 1),
    "Decoder": SimStage(5, 2, 1, 1),
    "one": SimStage(20, 4, 1, 8),
    "other": SimStage(15, 4, 1, 8),
}


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_with_even_times_waits_as_theory_says(busy):
    """M/D/1: the mean wait is rho s / 2 (1 - rho) (Pollaczek-Khinchine)."""
    alone = Service({"only": SimStage(10, 1)}, (("only",),), jitter=0)
    arrivals = poisson_arrivals(100 * busy, 600, seed=3).tolist()
    outcome = Simulation(alone).run(arrivals)
    waits = [latency - 0.010 for _, latency in outcome.answered]
    assert np.mean(waits) == pytest.approx(busy * 0.010 / (2 * (1 - busy)), rel=0.1)


def test_an_image_alone_takes_its_steps_one_after_the_other_and_the_slower_member():
    outcome = Simulation(Service(STAGES, STEPS, jitter=0)).run([1.0])
    assert outcome.answered == [(1.0, pytest.approx(0.006 + 0.005 + 0.020))]


def test_more_than_fits_is_refused_and_what_waits_too_long_is_dropped():
    arrivals = poisson_arrivals(1000, 30, seed=1).tolist()
    outcome = Simulation(Service(STAGES, STEPS, max_under_way=1500, timeout_s=5)).run(arrivals)
    assert outcome.refused
    assert outcome.late
    # No answer is later than its time and what it takes once it has its turn at the last stage.
    assert max(latency for _, latency in outcome.answered) < 5 + 8 * 0.020 * 2


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.integers(0, 3),
    st.sampled_from([40.0, 300.0, 600.0]),
    st.sampled_from([20, 1500]),
)
def test_every_image_is_answered_refused_or_late_and_the_same_seed_plays_the_same(
    replicas, seed, rate, most
):
    stages = {
        name: SimStage(stage.cpu_ms, stage.cores, number, stage.max_batch_size)
        for (name, stage), number in zip(STAGES.items(), replicas, strict=True)
    }
    arrivals = poisson_arrivals(rate, 10, seed).tolist()
    service = Service(stages, STEPS, max_under_way=most, timeout_s=1)
    outcome, again = (Simulation(service, seed).run(arrivals) for _ in "ab")
    assert sorted([at for at, _ in outcome.answered] + outcome.refused + outcome.late) == arrivals
    assert outcome == again


@dataclass(eq=False)
class Scaled:
    """A replica that is done at once with what comes, when it is ready."""

    ready_at: float = 0.0
    images: float = 0.0
    reports: list[UsageReport] = field(default_factory=list)


def targets_over(rates: list[float], start_s: float = 3.0) -> list[dict[str, int]]:
    """Return what the policy wants second by second; a report is known a second later."""
    rng, state, options = np.random.default_rng(1), State(), ScalingOptions.model_validate({})
    replicas = {name: [Scaled()] for name in STAGES}
    meters, targets = {name: StageMeter() for name in STAGES}, []
    for now, rate in enumerate(rates):
        for name, stage in STAGES.items():
            ready = [one for one in replicas[name] if one.ready_at <= now]
            for one, came in zip(ready, rng.poisson(rate / len(ready), len(ready)), strict=True):
                one.images += came
                done = (one.images, one.images, 0.0, one.images * stage.cpu_ms)
                one.reports.append(UsageReport(float(now), *done, stage.cores, stage.cpu_ms))
            meters[name].update({id(one): one.reports[-12:-1] for one in ready}, now)
        if (arriving := demand(meters)) is not None:
            stages = {
                name: StageState(stage.cpu_ms, stage.cores, 1, 16, len(replicas[name]))
                for name, stage in STAGES.items()
            }
            decision = decide(stages, arriving, state, now, options)
            state = decision.state
            for name, wanted in decision.targets.items():
                del replicas[name][wanted:]
                more = wanted - len(replicas[name])
                replicas[name] += [Scaled(now + start_s) for _ in range(more)]
        targets.append({name: len(present) for name, present in replicas.items()})
    return targets


def test_the_policy_follows_a_step_within_15_s_and_comes_back():
    targets = targets_over([40.0] * 60 + [300.0] * 120 + [40.0] * 240)
    before, after, end = targets[58], targets[74], targets[-1]
    assert all(after[name] > before[name] for name in after)
    carried = {"Gateway": 1000 / 6, "Decoder": 2000 / 5, "one": 4000 / 20, "other": 4000 / 15}
    assert all(after[name] * rate > 300 for name, rate in carried.items())
    assert end == dict.fromkeys(end, 1)
