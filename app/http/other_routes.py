"""The routes next to those that classify: feedback, teaching, samples, traffic, the web page.

/v1/feedback takes the right labels of earlier answers, and shows live accuracy by version.
/v1/teach takes photographs with their labels, /v1/samples erases samples. /v1/traffic shows
and changes the traffic between versions of a set, /v1/keys what each key used. The page and the API
description are served with all their assets from this machine. They need no key, so they must be
cheap: cached bytes, an ETag, and limits on concurrent answers and on their time.
"""

import asyncio
import base64
import hashlib
import json
import mimetypes
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated

import swagger_ui_bundle
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi import Path as Path_
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import SkipJsonSchema
from starlette.types import Message, Receive, Scope, Send

from app.access import KeyFigures
from app.answers import ErrorAnswer
from app.environment import KIB
from app.errors import (
    MAX_SHOWN,
    BadParameterError,
    NoTrafficError,
    NotReadyError,
    OverloadedError,
    TrafficLockedError,
    UnknownRequestError,
)
from app.graph.service import EnsembleService
from app.http.body import Headers, read_body, read_fields
from app.http.errors import CODED, ERRORS, Responses, described, json_body, object_of
from app.samples.feedback import (
    NONE,
    Feedback,
    FeedbackFigures,
    Taught,
    TaughtFigures,
    TaughtFolder,
)
from app.samples.samples import MAX_ID, Erasing, SharedSamples
from app.traffic.control import EXPECTED, TrafficControl, TrafficStatus
from models.image_files import KINDS, SUFFIXES

FEEDBACK_PATH = "/v1/feedback"
WANTED = '{"request_id": "...", "label": "..."}, and image, from 0, for a request of several'
OFF: Responses = {404: described(ErrorAnswer, "the request is not remembered, or feedback is off")}
REPORTING: Responses = {
    **OFF,
    **CODED,
    **{status: ERRORS[status] for status in (401, 408, 413, 422, 503)},
    409: described(ErrorAnswer, "the image has another label already, or the id other answers"),
}


class FeedbackRequest(BaseModel):
    """The right label of an image of an earlier request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: str  # of its answer
    label: str | int  # a label, class id or class number; a JSON number is always the last
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


def add_feedback(
    api: FastAPI,
    service: EnsembleService,
    feedback: Feedback | None,
    taught: TaughtFolder | None = None,
) -> None:
    """Add the routes; if feedback is off they answer with an error. ``taught`` gets its labels."""

    @api.post(
        FEEDBACK_PATH,
        responses=REPORTING,
        openapi_extra=json_body(FeedbackRequest.model_json_schema()),
        summary="Report the right label of an answered image",
    )
    async def report(request: Request) -> FeedbackAnswer:
        book = _on(feedback)
        timeout_s = service.settings.request_timeout_s
        fields = await read_fields(request, timeout_s, BadParameterError, WANTED)
        try:
            said = FeedbackRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = str(first["loc"][0])[:MAX_SHOWN]
            raise BadParameterError(f"{where}: {first['msg']}; send {WANTED}") from error
        judgement = await book.judge(
            said.request_id, str(said.label), said.image, service.labels_named(said.label)
        )
        answer, right = judgement.answer, judgement.is_right
        labels = list(answer.labels)
        if taught is not None and judgement.is_new:
            of_image = said.request_id, judgement.place, judgement.label, answer.version[0]
            with suppress(NotReadyError):  # feedback counts without it
                await asyncio.to_thread(taught.correct, *of_image)
        return FeedbackAnswer(said.request_id, judgement.label, labels, right, *answer.version)

    @api.get(
        FEEDBACK_PATH,
        responses=OFF | {503: ERRORS[503]},
        summary="How many answers were right by feedback, by version and plan",
    )
    async def figures() -> FeedbackFigures:
        return await _on(feedback).figures()


def _on(feedback: Feedback | None) -> Feedback:
    if feedback is None:
        raise UnknownRequestError("this service takes no feedback; start it with feedback: true")
    return feedback


TEACH_PATH = "/v1/teach"
NOT_TAUGHT: Responses = {404: described(ErrorAnswer, "teach is off, or no such model set")}
TEACHING: Responses = {
    **NOT_TAUGHT,
    **{status: ERRORS[status] for status in (400, 401, 408, 413, 415, 422, 429, 503)},
    403: described(ErrorAnswer, "the key may not teach"),
    409: described(ErrorAnswer, "the folder is full"),
}
PHOTOGRAPH = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
Label = Annotated[
    str, Query(description=f"a label, class id or class number of the set, or {NONE}")
]
SetName = Annotated[
    str | SkipJsonSchema[None], Query(description="the set, if the service has several")
]


def add_teaching(api: FastAPI, service: EnsembleService, taught: TaughtFolder | None) -> None:
    """Add the routes; if ``taught`` is None they answer with an error."""

    def folder() -> TaughtFolder:
        if taught is None:
            raise UnknownRequestError(
                "this service is not taught; start it with teach: true and teach_dir"
            )
        return taught

    @api.post(
        TEACH_PATH,
        response_model_exclude_none=True,
        responses=TEACHING,
        openapi_extra=PHOTOGRAPH,
        summary="Keep the photograph in the body with its label, for tandem learn --corrections",
    )
    async def teach(request: Request, label: Label, model_set: SetName = None) -> Taught:
        place, of_set = folder(), service.of_set(model_set)
        headers, settings = Headers(request.scope), service.settings
        headers.caller.check_set(of_set.name)
        meant = service.labels_named(label).get(of_set.name)
        if meant is None and label.casefold() != NONE:
            raise BadParameterError(
                f"label is {label[:MAX_SHOWN]!r}, no class of {of_set.name} by label, id or "
                f"number; GET /v1/models lists them, and {NONE} is for photographs of none"
            )
        with service.byte_budget.share() as share:
            image = await read_body(
                request, headers, settings.max_body_bytes, share, settings.request_timeout_s
            )
            of_set.model_set.manifest.inputs.check(
                image, max_pixels=settings.max_pixels, max_full_pixels=settings.max_full_pixels
            )
            return await asyncio.to_thread(place.keep, image, meant or NONE, of_set.name)

    @api.get(
        TEACH_PATH,
        responses=NOT_TAUGHT | {503: ERRORS[503]},
        summary="How many photographs of each class the Gateway that answers keeps",
    )
    async def kept() -> TaughtFigures:
        return await asyncio.to_thread(folder().figures)


SAMPLE_PATH = "/v1/samples/{sample_id}"
ERASING: Responses = {
    401: ERRORS[401],
    403: described(ErrorAnswer, "the key may not erase samples"),
    404: described(ErrorAnswer, "the service keeps no samples"),
    503: described(ErrorAnswer, "the deployment Samples does not answer"),
}
SampleId = Annotated[
    str,
    Path_(
        max_length=MAX_ID,
        description="the request id of an answer, a sample's file name without its end, or the id "
        "of a photograph that was taught",
    ),
]


def add_samples(api: FastAPI, samples: SharedSamples | None) -> None:
    """Add the route; ``samples`` is None if the service keeps none."""

    @api.delete(
        SAMPLE_PATH,
        responses=ERASING,
        summary="Erase samples of a request or photograph, at all Gateways and in the store",
    )
    async def erase(sample_id: SampleId) -> Erasing:
        if samples is None:
            raise UnknownRequestError(
                "this service keeps no samples: neither sample_dir nor teach is set"
            )
        return await samples.erase(sample_id)


TRAFFIC_PATH = "/v1/traffic"
MISSING: Responses = {
    404: described(ErrorAnswer, "no traffic, or a version that is not loaded"),
    503: described(ErrorAnswer, "the deployment Traffic does not answer, or memory is too small"),
}
CHANGING: Responses = {
    **MISSING,
    403: described(ErrorAnswer, "no keys, and the settings do not allow it"),
    **CODED,
    **{status: ERRORS[status] for status in (408, 413)},
    409: described(ErrorAnswer, "revision is not the newest plan's"),
    422: described(ErrorAnswer, "shares that are no split, or a version refused"),
}
SPLIT = {
    "shares": {"type": "object", "additionalProperties": {"type": "number"}},
    "shadow": {"type": "string", "nullable": True},
    "rollback": {"type": "boolean"},
    "revision": {"type": "integer"},
}
TRAFFIC_BODY = json_body(
    object_of(SPLIT), {"shares": {"imagenet@1083e06ff666": 95, "imagenet@5b1de7a0f9c2": 5}}
)


def add_traffic(api: FastAPI, service: EnsembleService, traffic: TrafficControl | None) -> None:
    """Add the routes; ``traffic`` is None if the settings have no versions."""

    def control() -> TrafficControl:
        if traffic is None:
            raise NoTrafficError(
                "this service has one version of its set: name others in the settings traffic or "
                "shadow"
            )
        return traffic

    @api.get(
        TRAFFIC_PATH,
        response_model_exclude_none=True,
        responses=MISSING,
        summary="Versions of the set: shares, shadow, comparison",
    )
    async def seen() -> TrafficStatus:
        return await control().status()

    @api.put(
        TRAFFIC_PATH,
        response_model_exclude_none=True,
        responses=CHANGING,
        openapi_extra=TRAFFIC_BODY,
        summary="Change shares and shadow, or go back; answered once all Gateways serve it",
    )
    async def change(request: Request) -> TrafficStatus:
        asked = control()
        if not service.keys and not service.settings.open_traffic:
            raise TrafficLockedError(
                "this service has no keys, so whoever reaches it could change its traffic: set "
                "api_keys_file, or open_traffic: true"
            )
        timeout_s = service.settings.request_timeout_s
        return await asked.change(
            await read_fields(request, timeout_s, BadParameterError, EXPECTED)
        )


KEYS_PATH = "/v1/keys"
NO_ADMIN: Responses = {
    403: described(ErrorAnswer, "the key has options, and admin is none of them")
}


def add_keys(api: FastAPI, service: EnsembleService) -> None:
    """Add the route of the keys' figures."""

    @api.get(
        KEYS_PATH,
        responses=NO_ADMIN,
        summary="What each key used, by name, of the Gateway that answers since its start",
    )
    async def figures(request: Request) -> dict[str, KeyFigures]:
        Headers(request.scope).caller.check_admin()
        return dict(sorted(service.keys.figures.items()))


PAGE_DIR = Path(__file__).parent / "page"
SWAGGER_DIR = Path(swagger_ui_bundle.swagger_ui_path)
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
INLINE_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
# Answers being sent: a slow client holds a part of this size, and the server's buffer.
MAX_AT_ONCE, PART_BYTES = 32, 64 * KIB
SENT_WITHIN_S = 20.0  # 1.4 MB at 70 KB/s; a slower client is cut off, and gives its place back
ROUTES_KEPT = 4  # path prefixes for which the description is cached; Serve has one


ALIVE, JSON = b'{"status":"alive"}', {"content-type": "application/json"}


def _headers(scripts: str) -> dict[str, str]:
    """Return the headers that keep a page from loading anything elsewhere; ``scripts`` may run."""
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


class Document:
    """Bytes with their response headers."""

    def __init__(self, data: bytes, media_type: str, headers: Mapping[str, str]) -> None:
        self.data, self._media_type = data, media_type
        self.etag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
        # Revalidated each time, so that no old script meets a new page after an upgrade.
        self._headers = {**headers, "cache-control": "no-cache", "etag": self.etag}

    def answer(self, request: Request) -> "BoundedResponse":
        """Return the response, without a body if the client already has these bytes."""
        known = request.headers.get("if-none-match", "")
        if known == "*" or self.etag in (
            tag.strip().removeprefix("W/") for tag in known.split(",")
        ):
            return BoundedResponse(None, 304, self._headers)
        return BoundedResponse(self.data, 200, self._headers, self._media_type)


class BoundedResponse(Response):
    """A response of which a process sends at most :data:`MAX_AT_ONCE` at a time."""

    num_sending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response in parts; raise :class:`OverloadedError` if the limit is reached.

        A server takes a part when most of those before it are sent. Later than
        :data:`SENT_WITHIN_S` the response ends incomplete.
        """
        if BoundedResponse.num_sending >= MAX_AT_ONCE:
            raise OverloadedError(
                f"{MAX_AT_ONCE} pages and their files are being sent, the limit; ask again soon"
            )
        BoundedResponse.num_sending += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SENT_WITHIN_S):
                    await super().__call__(scope, receive, partial(_in_parts, send))
        finally:
            BoundedResponse.num_sending -= 1


async def _in_parts(send: Send, message: Message) -> None:
    body = message.get("body", b"")
    for start in range(0, len(body), PART_BYTES):
        part = body[start : start + PART_BYTES]
        await send({"type": message["type"], "body": part, "more_body": True})
    await send({**message, "body": b""} if body else message)


@cache
def _page(name: str) -> Document:
    """Return a page; its inline script is allowed by its hash.

    Its addresses are relative, since the path at which browsers see the service is unknown here.
    """
    data = (PAGE_DIR / name).read_bytes()
    if ".heic" in SUFFIXES:  # otherwise phones convert the chosen photos
        data = data.replace(b"image/webp", b"image/webp,image/heic,image/heif,image/avif")
        data = data.replace(b"JPEG, PNG or WebP", KINDS.encode())
    scripts = INLINE_SCRIPT.findall(data.decode())
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    return Document(
        data, "text/html", _headers(" ".join(["'self'", *(f"'sha256-{d}'" for d in digests)]))
    )


@cache  # limited by the number of files
def _file(path: Path) -> Document:
    media_type, _ = mimetypes.guess_type(path.name)
    return Document(path.read_bytes(), media_type or "application/octet-stream", {})


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def add_pages(api: FastAPI) -> None:
    """Add ``/``, ``/docs``, their files and the description; all are served from here."""
    files = {f"/page/{path.name}": path for path in PAGE_DIR.iterdir() if path.is_file()}
    files |= {f"/docs/assets/{name}": SWAGGER_DIR / name for name in SWAGGER_FILES}

    @api.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        accepted, by = (request.headers.get(name, "") for name in ("accept", "user-agent"))
        # KServe's V1 client looks here for its status, and is httpx, which says that it takes all.
        is_html = not accepted or "text/html" in accepted or "*/*" in accepted
        if accepted == "*/*" and by.startswith("python-httpx/"):
            is_html = False
        answer = _page("index.html").answer(request) if is_html else Response(ALIVE, 200, JSON)
        answer.headers["vary"] = "Accept, User-Agent"
        return answer

    @api.options("/", include_in_schema=False)
    async def options() -> Response:
        return Response(None, 204, {"allow": "GET, HEAD, OPTIONS"})  # HAProxy's default check

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return _page("docs.html").answer(request)

    @api.get("/page/{name}", include_in_schema=False)
    @api.get("/docs/assets/{name}", include_in_schema=False)
    async def file(request: Request) -> Response:
        path = files.get(request.scope["path"].removeprefix(_root(request)))
        if path is None:
            raise HTTPException(404)
        return _file(path).answer(request)

    @lru_cache(ROUTES_KEPT)
    def description(root: str) -> Document:
        described = api.openapi() | ({"servers": [{"url": root}]} if root else {})
        return Document(json.dumps(described).encode(), "application/json", {})

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return description(_root(request)).answer(request)
