"""The Gateways' way to the book of feedback."""

import asyncio
from typing import Any

import pytest
from opentelemetry import trace

from app.deployments.hub import Hub
from app.errors import NotReadyError, UnknownRequestError
from app.samples import feedback as gateways
from app.samples.feedback import Feedback
from app.samples.feedback_book import FeedbackBook
from app.settings import Settings
from tests.support.answers import answer_of
from tests.support.fakes import FakeHandle


class Replica(Hub):
    """The book's replica in this process; it may be gone."""

    is_gone = False
    gate: asyncio.Event | None = None  # it hangs until this is set

    async def ask(self, method: str, *arguments: object) -> Any:
        if method == "remember" and self.is_gone:
            raise NotReadyError("it is gone")
        if method == "remember" and self.gate is not None:
            await self.gate.wait()
        return await super().ask(method, *arguments)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr("app.deployments.hub.start_replica", lambda _: None)
    monkeypatch.setattr(gateways, "SEND_EVERY_S", 0.01)
    return Replica(Settings(), FeedbackBook(100))


@pytest.fixture
def feedback(replica: Replica) -> Feedback:
    return Feedback(FakeHandle(replica))


async def test_what_was_answered_can_be_judged_at_once(feedback: Feedback) -> None:
    feedback.note("1", [b""], [answer_of()])
    assert (await feedback.judge("1", "x", None, ["fake"])).is_right


async def test_a_report_begins_no_trace(
    feedback: Feedback, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = []

    async def ask(method: str, *_: object) -> None:
        if method == "remember":
            spans.append(trace.get_current_span().get_span_context())

    monkeypatch.setattr(replica, "ask", ask)
    feedback.note("1", [b""], [answer_of()])
    await feedback.figures()  # reports at once
    (span,) = spans
    # Serve begins a trace where there is none, and continues this one, which is not sampled.
    assert span.is_valid
    assert not span.trace_flags.sampled


async def test_answers_are_reported_without_being_asked_for(
    feedback: Feedback, replica: Replica
) -> None:
    feedback.note("1", [b""], [answer_of()])
    async with asyncio.timeout(30):
        while not (await replica.ask("figures")).remembered_answers:
            await asyncio.sleep(0.005)
    feedback.note("2", [b""], [answer_of()])  # after the first task has ended
    async with asyncio.timeout(30):
        while (await replica.ask("figures")).remembered_answers < 2:
            await asyncio.sleep(0.005)


async def test_another_gateways_answer_that_is_on_its_way_is_waited_for(
    feedback: Feedback, replica: Replica
) -> None:
    other = Feedback(FakeHandle(replica))
    judging = asyncio.create_task(feedback.judge("1", "x", None, ["fake"]))
    await asyncio.sleep(0)  # it has asked, and waits
    other.note("1", [b""], [answer_of()])
    assert (await judging).is_right
    with pytest.raises(UnknownRequestError):
        await feedback.judge("2", "x", None, ["fake"])


async def test_a_replica_that_is_gone_is_no_answers_trouble(
    feedback: Feedback, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    replica.is_gone = True
    for number in range(3):
        feedback.note(f"{number}", [b""], [answer_of()])
        await feedback.figures()
    assert caplog.messages == ["answers were not recorded for feedback: it is gone"]


async def test_a_replica_that_hangs_is_an_error(
    feedback: Feedback, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "ANSWERS_WITHIN_S", 0.05)

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(replica, "ask", hangs)
    async with asyncio.timeout(30):
        with pytest.raises(NotReadyError, match="the deployment Feedback did not answer within"):
            await feedback.figures()


async def test_a_caller_that_leaves_takes_no_answers_along(
    feedback: Feedback, replica: Replica
) -> None:
    """It sends the answers of other requests, whose feedback would be refused."""
    replica.gate = asyncio.Event()
    feedback.note("1", [b""], [answer_of()])
    leaving = asyncio.create_task(feedback.judge("1", "x", None, ["fake"]))
    while feedback._unsent:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    replica.gate.set()
    assert (await feedback.judge("1", "x", None, ["fake"])).is_right
