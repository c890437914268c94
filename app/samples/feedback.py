"""Sends a Gateway's answers to the feedback book, which one replica keeps for all Gateways.

Answers are collected and sent a few times a second, so that no client waits for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from app.calls.hub_link import HubHandle
from app.errors import UnknownRequestError
from app.messages import Fault
from app.metrics.meter import meter
from app.metrics.table import FEEDBACK
from app.queueing.circuit_breaker import CircuitBreaker
from app.responses import Classified
from app.samples.feedback_book import AnsweredRequest, FeedbackFigures, Judgement
from app.tracing.parents import untraced_task
from models.errors import TandemError

SEND_EVERY_S = 0.2
ANSWERS_WITHIN_S = 4.0  # before HAProxy asks another Gateway, on a cluster after 5 s
MAX_UNSENT = 10_000  # requests; the oldest beyond it are dropped
logger = logging.getLogger("ray.serve")


class Feedback(HubHandle):
    """Reports answers and feedback to the book behind ``handle``."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "Feedback")
        self._unsent: deque[AnsweredRequest] = deque(maxlen=MAX_UNSENT)
        self._sending: asyncio.Task[None] | None = None
        self._breaker = CircuitBreaker()

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Report a request's answers to the book soon, without waiting."""
        self._unsent.append(AnsweredRequest.of(request_id, answers))
        if self._sending is None or self._sending.done():
            self._sending = untraced_task(self._send_soon())

    async def judge(
        self, request_id: str, label: str, image: int | None, sets: Collection[str]
    ) -> Judgement:
        """Report the right label of an image; see :meth:`FeedbackBook.judge`.

        Raises:
            TandemError: what that method raises, or the book's replica does not answer.

        """
        asked = request_id, label, image, list(sets)
        async with self.in_time(ANSWERS_WITHIN_S):
            await self._send_now()
            try:
                judgement: Judgement = await self.call("judge", *asked)
            except UnknownRequestError:  # another Gateway may have answered, and not yet reported
                await asyncio.sleep(2 * SEND_EVERY_S)
                judgement = await self.call("judge", *asked)
        if judgement.is_new:
            right = "yes" if judgement.is_right else "no"
            meter.count(FEEDBACK, right=right, model_version=judgement.answer.version[1])
        return judgement

    async def figures(self) -> FeedbackFigures:
        """Return the accuracy by version; see :meth:`FeedbackBook.figures`."""
        async with self.in_time(ANSWERS_WITHIN_S):
            await self._send_now()
            figures: FeedbackFigures = await self.call("figures")
        return figures

    async def _send_now(self) -> None:
        """Report the unsent answers, of other requests too: all of it if this request ends."""
        await asyncio.shield(untraced_task(self._send()))

    async def _send_soon(self) -> None:
        while self._unsent:
            await asyncio.sleep(SEND_EVERY_S)
            await self._send()

    async def _send(self) -> None:
        """Report the unsent answers; they are dropped if that fails."""
        if not self._unsent or not self._breaker.allows():
            self._unsent.clear()
            return
        requests = list(self._unsent)
        self._unsent.clear()
        try:
            async with self.in_time(ANSWERS_WITHIN_S):
                await self.call("remember", requests)
        except TandemError as error:
            if self._breaker.failed():
                logger.error("answers were not recorded for feedback: %s", error.message)
        else:
            self._breaker.succeeded()
