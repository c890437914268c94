"""Overload in virtual time, on machines of any speed: who is answered, how soon, and who is not."""

from functools import partial
from itertools import cycle
from typing import Any

import pytest

from tests.support.simulated_gateway import MAX_REQUESTS, Machine, SimulatedGateway

SMALL = Machine(num_cores=2, base_s=0.009, each_s=0.0155)  # 120 images/s
MACHINES = {
    "slow": Machine(num_cores=1, base_s=0.02, each_s=0.06),  # 16 images/s
    "small": SMALL,
    "fast": Machine(num_cores=4, base_s=0.005, each_s=0.01),  # 376 images/s
}


def played(machine: Machine, times: float, *, until: float, **more: Any) -> SimulatedGateway:
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
