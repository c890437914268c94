"""The feedback book as a deployment, with one replica that all Gateways share."""

from collections.abc import Collection, Sequence

from app.deployments.replica import start_replica
from app.samples.feedback_book import (
    AnsweredRequest,
    FeedbackBook,
    FeedbackFigures,
    Judgement,
)
from app.settings import Settings


class FeedbackReplica:
    """Serve's hooks around a :class:`FeedbackBook`; a new replica starts with an empty book."""

    def __init__(self, settings: Settings) -> None:
        start_replica(settings)
        self._book = FeedbackBook(settings.feedback_answers)

    async def remember(self, requests: Sequence[AnsweredRequest]) -> None:
        self._book.remember(requests)

    async def judge(
        self, request_id: str, label: str, image: int | None, sets: Collection[str]
    ) -> Judgement:
        return self._book.judge(request_id, label, image, sets)

    async def figures(self) -> FeedbackFigures:
        return self._book.figures()
