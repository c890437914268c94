"""When copies begin: simulated versions whose members share the cores, in virtual time."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from app.answers import StageTiming, Timings
from app.graph.request import ClassifyRequest, RequestAnswers
from app.queueing.batch_queue import BatchQueue
from app.queueing.scheduler import BatchScheduler, Pauses
from app.telemetry.metrics import RequestObserver
from app.traffic import graph
from app.traffic.graph import MAX_IMAGES, ShadowLane, TrafficGraph
from app.traffic.plan import Plan, Split, VersionFigures
from models.ensemble import AnswerRule
from tests.support.answers import answer_of
from tests.support.queued_images import submit
from tests.support.virtual_loop import run_virtually, virtually

MAIN, SHADOW = "tiny@aaaaaaaaaaaa", "tiny@cccccccccccc"
ROW = np.array([0.8, 0.2], np.float32)
DECODE_S, BASE_S, EACH_S = 0.002, 0.003, 0.003  # a batch takes a base, and as much for each image
HTTP_S = 0.003  # from an answer to the next request's image


class Version:
    """Two members, whose batches take their time on the scheduler's cores."""

    def __init__(self, scheduler: BatchScheduler, times: float) -> None:
        self._times = times
        clock = asyncio.get_running_loop().time
        self._queues = [
            BatchQueue(self._compute, (1, 2, 4, 8), 1000, clock, scheduler) for _ in range(2)
        ]

    async def _compute(self, batch):
        await asyncio.sleep(self._times * (BASE_S + EACH_S * len(batch)))
        return np.stack([ROW] * len(batch))

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        await asyncio.sleep(DECODE_S)
        image = np.zeros((1, 4, 4, 3), np.uint8)
        calls = [submit(queue, image, lane=request.lane)[0] for queue in self._queues]
        batches = [result.batch for result in await asyncio.gather(*calls)]
        stages = [StageTiming("infer", 0.0, b.infer_s * 1e3, "m", b.size) for b in batches]
        timings = Timings(9.0, [StageTiming("decode", 0.0, DECODE_S * 1e3), *stages])
        row = None if request.tensors is None else ROW
        return [replace(answer_of(), timings_ms=timings, probabilities=row)]


def asked() -> ClassifyRequest:
    return ClassifyRequest([b"photo"], 1, 10.0, "r", RequestObserver())


@dataclass
class Played:
    """What clients who send one request after another see, and what comes of the copies."""

    num_clients: int = 1
    pause_s: float = 0.0
    share: float = 0.02
    has_shadow: bool = True
    num_cores: int = 2
    times: float = 1.0  # what a batch of the shadow takes, in those of the main version
    until_s: float = 4.0
    took_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, **options) -> "Played":
        played = cls(**options)
        run_virtually(played._play())
        return played

    async def _play(self) -> None:
        scheduler = BatchScheduler(self.num_cores)
        versions = {MAIN: Version(scheduler, 1.0), SHADOW: Version(scheduler, self.times)}
        plan = Plan.first(Split({MAIN: 100.0}, SHADOW if self.has_shadow else None))
        lane = ShadowLane(scheduler, self.share)
        rule = AnswerRule(("class 0", "class 1"), None)
        traffic = TrafficGraph(versions, plan, 0.0, lambda _: rule, lane=lane)
        await asyncio.gather(*[self._client(traffic, n) for n in range(self.num_clients)])
        self.figures, self.answers = map(traffic.figures.of_version, (SHADOW, MAIN))

    async def _client(self, traffic: TrafficGraph, number: int) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(number * 0.001)
        while now() < self.until_s:
            came = now()
            await traffic.run(asked())
            self.took_s.append(now() - came)
            await asyncio.sleep(HTTP_S + self.pause_s)

    def latency_s(self, share: float = 0.5) -> float:
        return sorted(self.took_s)[int(share * len(self.took_s))]

    @property
    def num_guaranteed(self) -> float:
        """The images of copies that the share pays for."""
        return self.share * _cpu_ms(self.answers) / (_cpu_ms(self.figures) / self.figures.computed)


def _cpu_ms(figures: VersionFigures) -> float:
    return figures.compute_ms + figures.computed * DECODE_S * 1e3


@pytest.mark.parametrize(
    ("share", "pause_s"), [(0.0, 0.0), (0.02, 0.0), (0.02, 0.0093), (0.1, 0.0), (0.1, 0.0203)]
)
def test_one_client_waits_no_longer_with_a_shadow(share, pause_s) -> None:
    client = partial(Played.of, pause_s=pause_s, share=share)
    alone, beside = client(has_shadow=False), client()
    assert beside.latency_s() <= 1.05 * alone.latency_s()
    # A tenth of the compute is less of the time of a client that leaves a core idle.
    assert len(beside.took_s) >= 0.94 * len(alone.took_s)


def test_pauses_that_are_long_enough_are_enough_for_every_copy() -> None:
    client = partial(Played.of, pause_s=0.05, share=0.0)
    alone, beside = client(has_shadow=False), client()
    assert beside.figures.copies >= 0.95 * len(beside.took_s)
    assert beside.latency_s(0.95) <= 1.05 * alone.latency_s(0.95)


def test_two_free_places_are_enough_for_copies() -> None:
    """On a larger machine, clients that use half of it leave none of it but for a moment."""
    alone, beside = (Played.of(num_cores=4, has_shadow=is_so) for is_so in (False, True))
    assert beside.figures.copies >= 0.3 * len(beside.took_s)  # one at a time
    assert beside.latency_s(0.95) <= 1.05 * alone.latency_s(0.95)


@pytest.mark.parametrize(
    ("num_clients", "times", "share"), [(1, 1.0, 0.1), (16, 1.0, 0.02), (16, 4.0, 0.1)]
)
def test_the_share_is_computed_while_clients_leave_no_pause(num_clients, times, share) -> None:
    played = Played.of(num_clients=num_clients, times=times, share=share)
    num, exact = played.figures.copies, played.num_guaranteed
    assert 0.9 * exact - 1 <= num <= 1.1 * exact + 3  # the cost of the first copy is not known
    assert num + played.figures.dropped >= len(played.took_s) - MAX_IMAGES


def test_without_a_share_copies_of_a_busy_machine_are_dropped_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(graph, "COPY_TIME_S", 0.3)
    played = Played.of(num_clients=4, share=0.0, until_s=1.0)
    assert played.figures.copies == 0
    assert played.figures.dropped >= len(played.took_s) - MAX_IMAGES


@virtually
async def test_a_copy_that_clients_overtook_uses_the_share() -> None:
    """Else it would keep the only turn, and no other copy would have one."""
    scheduler = BatchScheduler()
    lane, (copied, answering) = ShadowLane(scheduler, 0.5), (Version(scheduler, 1.0) for _ in "ab")
    outcomes: list[RequestAnswers | Exception] = []
    lane.ask(copied, asked(), outcomes.append)
    for _ in range(10):  # there is always an image that waits
        first = asyncio.create_task(answering.run(asked()))
        await asyncio.sleep(0.003)
        lane.answered(await first)
        assert len(outcomes) <= 1
    assert isinstance(outcomes[0], list)


def test_pauses() -> None:
    pauses = Pauses()
    assert pauses.has_room_for(5.0, 0.0)  # nobody has come yet
    for second in range(0, 100, 10):
        pauses.note(second, is_busy=True)
        assert not pauses.has_room_for(0.0001, second + 1)
        pauses.note(second + 2, is_busy=False)  # for 8 s
    for lasted_s, is_likely in ((1.9, False), (2.0, True), (5.9, True), (6.1, False), (8.1, True)):
        assert pauses.has_room_for(2.0, 92 + lasted_s) == is_likely
