"""A Gateway in virtual time: Admission as it is, cores that run batches, HAProxy's refusals.

A batch costs its core ``base_s`` and ``each_s`` an image, so that the rate depends on how full the
batches are; what waits is taken in order. With ``fast_times`` an image under the fast plan costs
that many times less, and Admission has a PlanSwitch.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from app.errors import OverloadedError
from app.queueing.admission import Admission
from app.queueing.overload import ConcurrencyLimit, PlanSwitch
from tests.support.hand_clock import HandClock

MAX_REQUESTS = 128
VALID_MS, ASK_EVERY_MS = 1000, 100  # as in app/launch/haproxy_cfg/http_backend.cfg
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Machine:
    """What it computes with, and how fast."""

    num_cores: int
    base_s: float
    each_s: float
    max_batch_size: int = 8

    @property
    def capacity(self) -> float:
        full = self.max_batch_size
        return self.num_cores * full / (self.base_s + full * self.each_s)


@dataclass
class Proxy:
    """HAProxy: refuses beyond the limit that it knows, but for one request now and then."""

    said: int | None = None
    said_at = asked_at = float("-inf")
    num_refused: int = 0

    def refuses(self, now: float, num_under_way: int) -> bool:
        is_valid = self.said is not None and now - self.said_at < VALID_MS / 1e3
        if num_under_way < (self.said if is_valid and self.said is not None else MAX_REQUESTS):
            return False
        if now - self.asked_at < ASK_EVERY_MS / 1e3:
            self.num_refused += 1
            return True
        self.asked_at = now
        return False


@dataclass
class _Request:
    came: float
    num_images: int
    admitted: AbstractContextManager[None]
    num_left: int
    is_fast: bool
    on_end: Callable[[bool], None]


@dataclass
class SimulatedGateway:
    """Everything at ``clock``; ``answered`` are the times of the answers and how long each took."""

    machine: Machine
    target_wait_s: float | None = 0.05
    with_proxy: bool = True
    fast_times: float | None = None
    clock: HandClock = field(default_factory=lambda: HandClock(0.0))
    answered: list[tuple[float, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    stalled_until: float = 0.0
    changes: list[float] = field(default_factory=list)  # when the plan of new requests changed

    def __post_init__(self) -> None:
        machine, self.limit = self.machine, None
        if self.target_wait_s is not None:
            self.limit = ConcurrencyLimit(
                MAX_REQUESTS, machine.num_cores, machine.max_batch_size, self.target_wait_s
            )
        self.num_told = 0.0
        self.switch = PlanSwitch(MAX_REQUESTS) if self.fast_times else None
        self.admission = Admission(MAX_REQUESTS, self.clock, self._count, self.limit, self.switch)
        self._proxy = Proxy()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting: deque[_Request] = deque()  # a request for each of its images
        self._num_free = machine.num_cores

    def _count(self, num: float) -> None:
        self.num_told += num

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let something happen then."""
        heapq.heappush(self._events, (when, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.clock.now, _, act = heapq.heappop(self._events)
            act()
        self.clock.now = until

    def come(self, num_images: int = 1, on_end: Callable[[bool], None] = lambda _: None) -> None:
        """Let a request come; ``on_end`` is told whether it was answered."""
        if self.with_proxy:
            if self._proxy.refuses(self.clock.now, self.admission.num_under_way):
                self.refused.append(self.clock.now)
                on_end(False)
                return
            if self._proxy.num_refused:
                self.admission.refused_before(self._proxy.num_refused)
                self._proxy.num_refused = 0
        admitted = self.admission.admit()
        try:
            admitted.__enter__()
        except OverloadedError as error:
            self._proxy.said, self._proxy.said_at = error.limits[0], self.clock.now
            self.refused.append(self.clock.now)
            on_end(False)
            return
        self.admission.holds(num_images)
        is_fast = self.admission.is_nearly_full
        if is_fast != len(self.changes) % 2:
            self.changes.append(self.clock.now)
        request = _Request(self.clock.now, num_images, admitted, num_images, is_fast, on_end)
        self._waiting.extend([request] * num_images)
        self._start()

    def _start(self) -> None:
        while self._num_free and self._waiting:
            size = min(self.machine.max_batch_size, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(size)]
            self._num_free -= 1
            costs = sum(1 / (self.fast_times or 1) if one.is_fast else 1 for one in batch)
            took_s = self.machine.base_s + costs * self.machine.each_s
            self.at(max(self.clock.now, self.stalled_until) + took_s, partial(self._ended, batch))

    def _ended(self, batch: list[_Request]) -> None:
        self._num_free += 1
        for request in batch:
            request.num_left -= 1
            if not request.num_left:
                request.admitted.__exit__(None, None, None)
                self.answered.append((self.clock.now, self.clock.now - request.came))
                request.on_end(True)
        self._start()

    def open_loop(self, rate, since, until, sizes=None):
        draw, when = random.Random(7), since
        while (when := when + draw.expovariate(rate)) < until:
            self.at(when, partial(self.come, next(sizes) if sizes else 1))

    def closed_loop(self, num_clients: int, since: float, until: float, retry_s: float) -> None:
        """Let so many clients send one request after another; who is refused waits that long."""

        def ended(was_answered: bool) -> None:
            when = self.clock.now + (1e-3 if was_answered else retry_s)
            if when < until:
                self.at(when, lambda: self.come(on_end=ended))

        for number in range(num_clients):
            self.at(since + 1e-3 * number, lambda: self.come(on_end=ended))

    def rate(self, since: float, until: float) -> float:
        return sum(since <= when < until for when, _ in self.answered) / (until - since)

    def took_s(self, since: float, until: float, share: float) -> float:
        took = sorted(took_s for when, took_s in self.answered if since <= when < until)
        return took[min(len(took) - 1, int(share * len(took)))]

    def num_refused(self, since: float, until: float) -> int:
        return sum(since <= when < until for when in self.refused)
