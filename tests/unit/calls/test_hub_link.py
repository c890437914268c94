"""The link with a deployment that knows something for all Gateways: away, slow, back again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from opentelemetry import trace

from app.calls import hub_link
from app.calls.hub_link import CALL_S, EXCHANGE_EVERY_S, FIRST_S, HubLink
from app.errors import NotReadyError
from tests.support.virtual_loop import virtually


class Handle:
    """A deployment's handle, whose one method awaits what the test sets."""

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, int]]) -> None:
        self.answer = answer
        self.report = self

    def remote(self) -> Coroutine[Any, Any, int]:
        return self.answer()


class Link(HubLink):
    """Keeps every answer of the deployment; loads for ``loads_s`` after the first."""

    loads_s = 0.0

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, int]]) -> None:
        super().__init__(Handle(answer), "Hub")
        self.answers: list[int] = []

    async def _exchange(self) -> None:
        self.answers.append(await self._call("report"))
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
    await asyncio.sleep(3 * EXCHANGE_EVERY_S + 0.1)
    assert link.answers == [7] * 4


@virtually
async def test_its_calls_begin_no_trace() -> None:
    spans = []

    async def seen() -> int:
        spans.append(trace.get_current_span().get_span_context())
        return 7

    await Link(seen).start()
    await asyncio.sleep(EXCHANGE_EVERY_S + 0.1)
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
async def test_a_start_without_the_deployment_ends_and_says_so_once(
    answer: Callable[[], Coroutine[Any, Any, int]], caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(answer)
    began = asyncio.get_running_loop().time()
    with caplog.at_level(logging.WARNING, hub_link.logger.name):
        await link.start()
        assert asyncio.get_running_loop().time() - began == pytest.approx(FIRST_S)
        assert [record.getMessage() for record in caplog.records if "Hub" in record.getMessage()]
        assert len(caplog.records) == 1
        link._handle.answer = _seven  # it is back, and goes away again
        await asyncio.sleep(CALL_S + 2 * EXCHANGE_EVERY_S)
        assert link.answers
        link._handle.answer = _away
        await asyncio.sleep(3 * EXCHANGE_EVERY_S)
    assert len(caplog.records) == 2


@virtually
async def test_a_call_of_a_deployment_that_is_silent_ends_with_the_reason() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(NotReadyError, match="Hub did not answer within 5 s; requests are served"):
        await Link(_silent)._call("report")
    assert asyncio.get_running_loop().time() - began == pytest.approx(CALL_S)
