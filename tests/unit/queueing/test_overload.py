"""Overload in virtual time, on machines of any speed: who is answered, how soon, and who is not."""

import math
from functools import partial
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.queueing.overload import TRUSTED_S, PlanSwitch
from tests.support.cases import cases
from tests.support.simulated_gateway import MAX_REQUESTS, Machine, SimulatedGateway

SMALL = Machine(num_cores=2, base_s=0.009, each_s=0.0155)  # 120 images/s
MACHINES = {
    "slow": Machine(num_cores=1, base_s=0.02, each_s=0.06),  # 16 images/s
    "small": SMALL,
    "fast": Machine(num_cores=4, base_s=0.005, each_s=0.01),  # 376 images/s
}


def played(machine, times, *, until, **more):
    """Return a gateway to which requests come at this multiple of the capacity."""
    gateway = SimulatedGateway(machine, **more)
    gateway.open_loop(times * machine.capacity, since=0, until=until)
    return gateway


def usual_p99_s(machine: Machine) -> float:
    """Return the p99 at 80 % of the capacity."""
    gateway = played(machine, 0.8, until=20)
    gateway.run(20)
    assert not gateway.refused
    return gateway.took_s(2, 20, 0.99)


@pytest.mark.parametrize("with_proxy", [True, False], ids=["haproxy", "gateway"])
@pytest.mark.parametrize("times", [1.5, 3, 10])
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_let_in_is_answered_soon_and_no_core_rests(name, times, with_proxy):
    machine = MACHINES[name]
    # So long that the places are taken and the first of them are answered, whatever the machine.
    settled = 4 * MAX_REQUESTS / machine.capacity
    gateway = played(machine, times, until=settled + 12, with_proxy=with_proxy)
    gateway.run(settled + 12)
    assert gateway.limit.is_on
    assert gateway.rate(settled, settled + 12) > 0.95 * machine.capacity
    assert gateway.took_s(settled, settled + 12, 0.99) < 3 * usual_p99_s(machine)


def test_without_the_limit_everybody_waits():
    """The tests above can fail."""
    gateway = played(SMALL, 3, until=12, target_wait_s=None)
    gateway.run(12)
    assert gateway.took_s(5, 12, 0.99) > 4 * usual_p99_s(SMALL)


@pytest.mark.parametrize("num_clients", [16, 64, 128])
def test_clients_with_many_connections_are_all_answered(num_clients):
    gateway = SimulatedGateway(SMALL)
    gateway.closed_loop(num_clients, since=0, until=20, retry_s=1.0)
    gateway.run(20)
    assert not gateway.refused


def test_a_burst_after_a_quiet_time_is_answered_as_far_as_there_are_places():
    gateway = SimulatedGateway(SMALL)
    for burst in range(5):
        for _ in range(2 * MAX_REQUESTS):
            gateway.at(5.0 * burst, gateway.come)
    gateway.run(30)
    # Of those beyond one goes on to ask, and finds no place either.
    assert len(gateway.answered) == 5 * MAX_REQUESTS


def test_bursts_that_leave_time_between_them_are_no_overload():
    """Below the capacity on the whole, after an overload too."""
    gateway = played(SMALL, 5, until=5)
    for burst in range(20):
        for _ in range(MAX_REQUESTS // 2):
            gateway.at(6.0 + burst, gateway.come)
    gateway.run(30)
    assert not gateway.num_refused(8, 30)


def test_a_stall_at_a_usual_rate_makes_no_overload():
    """What hangs fills the places; when it goes on, they are worked off and nobody is refused."""
    gateway = played(SMALL, 0.7, until=30)
    gateway.at(5.0, lambda: setattr(gateway, "stalled_until", 8.0))
    gateway.run(30)
    assert gateway.num_refused(0, 8)
    assert not gateway.num_refused(8.5, 30)


def test_after_an_overload_all_places_are_there_again():
    gateway = played(SMALL, 5, until=10)
    gateway.open_loop(0.8 * SMALL.capacity, since=10, until=30)
    for _ in range(100):
        gateway.at(31.0, gateway.come)
    gateway.run(35)
    assert gateway.num_refused(11, 20) < 0.02 * 9 * SMALL.capacity
    assert not gateway.num_refused(20, 35)


def test_every_refusal_counts_as_demand_whoever_refused():
    gateway = played(SMALL, 5, until=10)
    gateway.run(20)
    gateway.come()  # what HAProxy has not told yet comes with the next one
    assert gateway.num_told == len(gateway.refused) > 1000


def test_forms_and_photos_are_both_answered():
    """A form is one request: it is let in as often as a photo is, and does not keep others out."""
    gateway = SimulatedGateway(SMALL)
    sizes = cycle([1, 1, 1, 16])
    seen = {1: [0, 0], 16: [0, 0]}

    def come(size: int) -> None:
        def ended(was_answered: bool) -> None:
            seen[size][was_answered] += 1

        gateway.come(size, ended)

    for number, size in zip(range(2000), sizes, strict=False):
        gateway.at(number / 100, partial(come, size))  # 475 images/s
    gateway.run(30)
    shares = {size: answered / (refused + answered) for size, (refused, answered) in seen.items()}
    assert min(shares.values()) > 0.1
    assert shares[1] < 2 * shares[16]
    assert shares[16] < 2 * shares[1]
    assert gateway.took_s(12, 20, 0.99) < 1.2


def with_plans(machine, **more):
    """Return a gateway that is fast when nearly full; the fast plan is about twice as fast."""
    return SimulatedGateway(machine, fast_times=2.1, **more)


@pytest.mark.parametrize("target_wait_s", [0.05, None], ids=["limit", "no limit"])
@pytest.mark.parametrize("name", MACHINES)
def test_the_fast_plan_answers_what_full_would_refuse_and_calm_ends_it(name, target_wait_s):
    machine = MACHINES[name]
    gateway = with_plans(machine, target_wait_s=target_wait_s)
    gateway.open_loop(1.8 * machine.capacity, since=0, until=70)
    gateway.open_loop(0.5 * machine.capacity, since=70, until=80)
    gateway.open_loop(1.8 * machine.capacity, since=80, until=100)
    gateway.run(103)
    gateway.come()
    fast, full, again, after_silence = gateway.changes  # none between: it does not flap
    assert fast < 0.9 * MAX_REQUESTS / (0.8 * machine.capacity)  # before the places are taken
    assert 70 < full < 73
    assert again > 80
    assert after_silence == 103
    assert not gateway.refused


def test_without_the_fast_plan_many_are_refused():
    """The test above can fail."""
    gateway = played(SMALL, 1.8, until=70)
    gateway.run(70)
    assert gateway.num_refused(0, 70) > 0.3 * len(gateway.answered)


@cases("times, most_changes", (0.8, 0), (0.95, 3), (1.1, 2), (1.8, 1), (10, 1))
@pytest.mark.parametrize("name", MACHINES)
def test_a_steady_rate_does_not_make_the_plan_flap(name, times, most_changes):
    machine = MACHINES[name]
    gateway = with_plans(machine)
    gateway.open_loop(times * machine.capacity, since=0, until=60)
    gateway.run(60)
    assert len(gateway.changes) <= most_changes
    if times > 1.8:  # more than the fast plan answers
        assert gateway.rate(5 * MAX_REQUESTS / machine.capacity, 60) > 1.6 * machine.capacity


@pytest.mark.parametrize(("num_before", "num_at_once"), [(0, 100), (0, 1000), (40, 100)])
def test_the_rate_of_full_is_measured_even_if_all_places_are_taken_at_once(num_before, num_at_once):
    """Few requests before say nothing of it."""
    gateway = with_plans(SMALL)
    for number in range(num_before):
        gateway.at(number / 4, gateway.come)
    for _ in range(num_at_once):
        gateway.at(10.0, gateway.come)
    gateway.open_loop(0.5 * SMALL.capacity, since=10, until=20)
    gateway.run(20)
    assert 0.8 * SMALL.capacity < gateway.switch.full_rate < 1.2 * SMALL.capacity
    fast, full = gateway.changes
    assert fast == 10
    assert full < 13.5


def test_an_unknown_rate_of_full_lets_it_try_full_when_there_is_room():
    switch = PlanSwitch(MAX_REQUESTS)
    switch.refused(0.0, 3)  # slow uploads held the places: nothing was answered meanwhile
    for number in range(1, 160):
        switch.arrived(number / 100, 20)
    assert switch.full_rate == math.inf
    assert not switch.is_fast


def test_a_rate_of_full_is_forgotten_since_images_change():
    gateway = with_plans(SMALL)
    gateway.open_loop(1.8 * SMALL.capacity, since=0, until=TRUSTED_S + 20)
    gateway.run(TRUSTED_S - 1)
    assert len(gateway.changes) == 1
    gateway.machine = Machine(num_cores=8, base_s=0.009, each_s=0.0155)
    gateway._num_free += 6
    gateway.run(TRUSTED_S + 20)
    assert len(gateway.changes) == 2  # full carries it now
    assert not gateway.refused


def test_a_refusal_makes_it_fast_and_calm_counts_from_the_last():
    switch = PlanSwitch(MAX_REQUESTS)
    switch.refused(0.0, 10)
    assert switch.is_fast
    for tenth in range(1, 40):
        switch.arrived(tenth / 10, 10)
        if tenth == 10:
            switch.refused(1.0, 10)
        assert switch.is_fast == (tenth < 25)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_is_never_fast_after_three_seconds_of_calm(data):
    """Whatever came before; calm is few under way, and less than 0.9 of the rate of full."""
    switch, now = PlanSwitch(MAX_REQUESTS), 0.0
    events = st.sampled_from(["arrived", "answered", "refused"])
    steps = st.tuples(events, st.floats(0.0, 2.0), st.integers(0, MAX_REQUESTS), st.integers(1, 99))
    for event, gap_s, num_present, num in data.draw(st.lists(steps, min_size=5, max_size=60)):
        now += gap_s
        if event == "arrived":
            switch.arrived(now, num_present, num)
        elif event == "refused":
            switch.refused(now, num_present)
        else:
            for _ in range(num):
                switch.answered()
    switch.arrived(now, 0)  # a measurement that is due is made
    calm_from, longest_s = now, 0.25
    while now < calm_from + 3:
        shortest_s = min(longest_s, 1 / (0.9 * switch.full_rate) + 1e-6)
        now += data.draw(st.floats(max(shortest_s, 0.02), longest_s))
        switch.arrived(now, data.draw(st.integers(0, MAX_REQUESTS // 4 - 1)))
    assert not switch.is_fast or switch.full_rate < 1 / (0.9 * longest_s)
