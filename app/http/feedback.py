"""POST and GET /v1/feedback: the right labels of earlier answers, and live accuracy by version."""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import SkipJsonSchema

from app.errors import MAX_SHOWN, BadParameterError, UnknownRequestError
from app.graph.service import EnsembleService
from app.http.errors import CODED, ERRORS, described
from app.http.json_fields import read_fields
from app.responses import ErrorAnswer
from app.samples.feedback import Feedback
from app.samples.feedback_book import FeedbackFigures

PATH = "/v1/feedback"
WANTED = '{"request_id": "...", "label": "..."}, and image, from 0, for a request of several'
OFF: dict[int | str, dict[str, Any]] = {
    404: described(ErrorAnswer, "the request is not remembered, or feedback is off")
}
REPORTING: dict[int | str, dict[str, Any]] = {
    **OFF,
    **CODED,
    **{status: ERRORS[status] for status in (401, 408, 413, 422, 503)},
    409: described(ErrorAnswer, "the image has another label already, or the id other answers"),
}


class FeedbackRequest(BaseModel):
    """The right label of an image of an earlier request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: str  # of its answer
    label: str
    image: int | SkipJsonSchema[None] = None  # its place in a request of several files, from 0


@dataclass(slots=True)
class FeedbackAnswer:
    """Whether an answer was right, by its feedback."""

    request_id: str
    label: str
    answered: list[str]  # the first label; of a multi-label set, all that were listed
    right: bool
    model_set: str
    model_version: str


BODY = {
    "required": True,
    "content": {"application/json": {"schema": FeedbackRequest.model_json_schema()}},
}


def add_feedback(api: FastAPI, service: EnsembleService, feedback: Feedback | None) -> None:
    """Add the routes; if feedback is off they answer with an error."""

    @api.post(
        PATH,
        responses=REPORTING,
        openapi_extra={"requestBody": BODY},
        summary="Report the right label of an answered image",
    )
    async def report(request: Request) -> FeedbackAnswer:
        book = _on(feedback)
        timeout_s = service.settings.request_timeout_s
        said = _checked(await read_fields(request, timeout_s, BadParameterError, WANTED))
        judgement = await book.judge(
            said.request_id, said.label, said.image, service.sets_with(said.label)
        )
        model_set, version = judgement.answer.version
        return FeedbackAnswer(
            said.request_id,
            said.label,
            list(judgement.answer.labels),
            judgement.is_right,
            model_set,
            version,
        )

    @api.get(
        PATH,
        responses=OFF | {503: ERRORS[503]},
        summary="How many answers were right by feedback, by version",
    )
    async def figures() -> FeedbackFigures:
        return await _on(feedback).figures()


def _on(feedback: Feedback | None) -> Feedback:
    if feedback is None:
        raise UnknownRequestError("this service takes no feedback; start it with feedback: true")
    return feedback


def _checked(fields: dict[str, Any]) -> FeedbackRequest:
    try:
        return FeedbackRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0])[:MAX_SHOWN]
        raise BadParameterError(f"{where}: {first['msg']}; send {WANTED}") from error
