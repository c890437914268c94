"""Facts that all Gateways share: the book of a hub, and a link that is away, slow, back again."""

import asyncio
import logging
from dataclasses import dataclass

import pytest
from opentelemetry import trace

from app.errors import NotReadyError
from app.graph import hub_link
from tests.support.cases import cases
from tests.support.hand_clock import HandClock
from tests.support.virtual_loop import virtually


class Handle:
    """A hub's handle, whose one method awaits what the test sets."""

    def __init__(self, answer):
        self.answer = answer
        self.ask = self

    def remote(self, _):
        return self.answer()


class Link(hub_link.HubLink):
    """Keeps every answer of the deployment; loads for ``loads_s`` after the first."""

    loads_s = 0.0

    def __init__(self, answer):
        super().__init__(Handle(answer), "Hub")
        self.answers: list[int] = []

    async def _exchange(self) -> None:
        self.answers.append(await self.call("report"))
        if self.loads_s and self._loading is None:
            self._loading = asyncio.create_task(asyncio.sleep(self.loads_s))


async def _seven() -> int:
    return 7


async def _away() -> int:
    raise ConnectionError("no such actor")


async def _silent() -> int:
    await asyncio.sleep(3600)
    return 0


@virtually
async def test_it_exchanges_every_second_and_a_second_start_changes_nothing() -> None:
    link = Link(_seven)
    await link.start()
    await link.start()
    assert link.answers == [7]
    await asyncio.sleep(3 * hub_link.EXCHANGE_EVERY_S + 0.1)
    assert link.answers == [7] * 4


@virtually
async def test_its_calls_begin_no_trace() -> None:
    spans = []

    async def seen() -> int:
        spans.append(trace.get_current_span().get_span_context())
        return 7

    await Link(seen).start()
    await asyncio.sleep(hub_link.EXCHANGE_EVERY_S + 0.1)
    assert len(spans) == 2
    # Serve begins a trace where there is none, and continues this one, which is not sampled.
    assert all(span.is_valid and not span.trace_flags.sampled for span in spans)


@virtually
async def test_the_start_waits_for_what_is_loaded_and_reports_it() -> None:
    link = Link(_seven)
    link.loads_s = 2.5
    began = asyncio.get_running_loop().time()
    await link.start()
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.5)
    assert len(link.answers) == 4  # at once, two of every second, and one of what was loaded


@virtually
@pytest.mark.parametrize("answer", [_away, _silent])
async def test_a_start_without_the_deployment_ends_and_says_so_once(answer, caplog):
    link = Link(answer)
    began = asyncio.get_running_loop().time()
    with caplog.at_level(logging.WARNING, hub_link.logger.name):
        await link.start()
        assert asyncio.get_running_loop().time() - began == pytest.approx(hub_link.FIRST_S)
        assert [record.getMessage() for record in caplog.records if "Hub" in record.getMessage()]
        assert len(caplog.records) == 1
        link._handle.answer = _seven  # it is back, and goes away again
        await asyncio.sleep(hub_link.CALL_S + 2 * hub_link.EXCHANGE_EVERY_S)
        assert link.answers
        link._handle.answer = _away
        await asyncio.sleep(3 * hub_link.EXCHANGE_EVERY_S)
    assert len(caplog.records) == 2


@virtually
async def test_a_call_of_a_deployment_that_is_silent_ends_with_the_reason() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(NotReadyError, match="Hub did not answer within 5 s; requests are served"):
        await Link(_silent).call("report")
    assert asyncio.get_running_loop().time() - began == pytest.approx(hub_link.CALL_S)


@dataclass(frozen=True)
class Number:
    """Facts of which the larger are the newer."""

    revision: int
    origin: str = "ours"

    def merged(self, other):
        return max(self, other, key=lambda facts: facts.revision)


class Numbers(hub_link.Book[Number, str]):
    def __init__(self, clock: HandClock) -> None:
        super().__init__(Number(1), clock)
        self.forgotten: list[str] = []

    def _forget(self, more: str) -> None:
        self.forgotten.append(more)


@cases(
    "reported, newest, revisions",
    (Number(0), Number(1), [0]),
    (Number(1), Number(1), [1]),
    (Number(3), Number(3), [3]),  # the book began anew
    (Number(3, "of other settings"), None, []),
)
def test_a_report_is_answered_with_the_newest_facts(reported, newest, revisions):
    book = Numbers(HandClock())
    assert book.report("g", reported, "") == newest
    assert book.facts == (newest or Number(1))
    assert book.revisions() == revisions


def test_a_gateway_may_serve_less_than_it_knows_and_counts_until_it_is_silent() -> None:
    clock = HandClock()
    book = Numbers(clock)
    book.report("behind", Number(1), "", 0)
    clock.now += hub_link.IS_THERE_S - 1
    book.report("g", Number(1), "")
    assert book.revisions() == [0, 1]
    clock.now += 1
    assert book.revisions() == [1]


def test_the_most_silent_gateway_is_forgotten() -> None:
    book = Numbers(HandClock())
    for number in range(hub_link.MAX_REPORTS):
        book.report(f"g{number}", Number(1), f"of {number}")
    book.report("g0", Number(1), "of 0 again")
    assert book.forgotten == []
    book.report("new", Number(1), "of new")
    assert (book.forgotten, len(book.revisions())) == (["of 1"], hub_link.MAX_REPORTS)


class Following(hub_link.HubLink):
    """Asks for the revisions of Gateways, which ``turns`` lists; the last for ever."""

    def __init__(self, *turns: list[int]) -> None:
        super().__init__(None, "Hub")
        self.turns, self.num_exchanges = list(turns), 0

    async def _exchange(self) -> None:
        self.num_exchanges += 1

    async def call(self, method, *_):
        assert method == "revisions"
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]


@virtually
@cases(
    "turns, waited_s, served",
    ([[2, 3]], 0, [2, 3]),
    ([[]], 0, []),  # no Gateway reports
    ([[2, 1], [2, 1], [2, 2]], hub_link.EXCHANGE_EVERY_S / 2, [2, 2]),
    ([[2, 1]], 5, [2, 1]),
    ids=["at once", "none", "soon", "never"],
)
async def test_a_change_is_waited_for(turns, waited_s, served):
    link, loop = Following(*turns), asyncio.get_running_loop()
    began = loop.time()
    assert await link._everywhere(2, 5.0) == served
    assert loop.time() - began == pytest.approx(waited_s)
    assert link.num_exchanges >= 1
