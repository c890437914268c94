"""The HTTP interface: what every request passes, and the routes."""

import asyncio
import time
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response
from opentelemetry import trace
from opentelemetry.trace import Span, format_trace_id
from pydantic.json_schema import SkipJsonSchema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.graph.service import EnsembleService
from app.http.auth import KeyedRequests, describe_keys
from app.http.body import ClosedUnread
from app.http.classify import PATH, ClassifyRoute
from app.http.errors import ERRORS, add_error_handlers
from app.http.open_inference import add_open_inference
from app.http.origins import AllowedOrigins
from app.http.pages import add_pages
from app.metrics.requests import CLIENT_WENT, record_answered
from app.oip.inference import Inference
from app.responses import Classified, Ready, Results, ServedModels

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"files": {"type": "array", "items": BINARY["schema"]}},
    }
}
BODY = {"content": {**dict.fromkeys(IMAGE_TYPES, BINARY), "multipart/form-data": FORM}}
TRACE_ID_HEADER = b"x-trace-id"
NO_ROUTE = "other"  # paths that are no route are one, however many a scanner tries


class ObservedRequests:
    """Stands before the interface; Serve has begun the span of a request that is sampled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and hear of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span = trace.get_current_span()
        started, status = time.perf_counter(), 500  # what an exception becomes, further out

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if span.is_recording():
                    _name_span(span, scope, message)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            status = CLIENT_WENT
            raise
        finally:
            route = _route_of(scope) or NO_ROUTE
            record_answered(route, status, (time.perf_counter() - started) * 1e3)


def _route_of(scope: Scope) -> str | None:
    """Return the path of the route that answers, with its parameters' names."""
    return getattr(scope.get("route"), "path", None)


def _name_span(span: Span, scope: Scope, answer: Message) -> None:
    """Name a request's span, give it the status, and add its trace id to the answer's headers."""
    route, status = _route_of(scope), answer["status"]
    span.update_name(f"{scope['method']} {route}" if route else scope["method"])
    span.set_attribute("http.response.status_code", status)
    trace_id = format_trace_id(span.get_span_context().trace_id).encode("ascii")
    answer["headers"] = [*answer.get("headers", ()), (TRACE_ID_HEADER, trace_id)]


class TandemAPI(FastAPI):
    """The HTTP interface: one route that takes images, and FastAPI for all others.

    FastAPI only describes the first one. Every request passes the same middlewares, which observe
    it, answer pages of other origins and ask for a key.
    """

    def __init__(self, service: EnsembleService) -> None:
        super().__init__(
            title="Tandem",
            openapi_url=None,  # app.http.pages has both
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # a redirect would not know the scheme that the client used
            separate_input_output_schemas=False,
            telemetry={
                "tracing": False,
                "metrics": False,
                "logs": False,
            },  # Serve has the request's
        )
        self.openapi_version = "3.0.3"  # what the bundled Swagger UI reads
        self.classify = ClassifyRoute(service)
        keys = service.keys
        keyed = KeyedRequests(self._dispatch, keys) if keys else self._dispatch
        origins = service.settings.allowed_origins
        front = AllowedOrigins(keyed, origins) if origins else keyed
        self._front = ClosedUnread(ObservedRequests(front))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        await self._front(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.classify.takes(scope):
            await self.classify(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "HEAD":
            await self._answer_head(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _answer_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as to GET, without the content."""
        asked = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            scope["route"] = asked.get("route")  # for who observes the request
            await send({**message, "body": b""} if "body" in message else message)

        await super().__call__(asked, receive, send_head)


def create_api(service: EnsembleService, inference: Inference | None = None) -> TandemAPI:
    """Return the ASGI application in front of ``service``.

    ``inference`` is the service's by the Open Inference Protocol, if gRPC has it too.
    """
    api = TandemAPI(service)
    describe_keys(api, service.keys)
    add_error_handlers(api)
    _describe_classify(api)
    _add_state(api, service)
    add_open_inference(api, inference or Inference(service))
    add_pages(api)
    return api


def _describe_classify(api: TandemAPI) -> None:
    @api.post(
        PATH,
        response_model=Classified | Results,
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, **BODY}},
        summary="Classify the image in the body, or every file of a multipart form",
    )
    async def classify(
        top_k: Annotated[
            int, Query(description="classes in the answer; of a multi-label set at most")
        ] = api.classify.default_top_k,
        threshold: Annotated[
            float | SkipJsonSchema[None],
            Query(description="of a multi-label set: the least score of a label in the answer"),
        ] = None,
    ) -> Response:
        raise NotImplementedError("ClassifyRoute answers the requests of this route")


def _add_state(api: TandemAPI, service: EnsembleService) -> None:
    @api.get(
        "/v1/models",
        response_model_exclude_none=True,
        summary="The served set: members, classes, accuracy record",
    )
    async def models() -> ServedModels:
        return service.served_models()

    @api.get("/healthz", summary="The Gateway lives")
    async def healthz() -> Ready:
        return Ready(ready=True)

    @api.get(
        "/readyz",
        responses={503: ERRORS[503]},
        summary="As many members answer as answer_policy wants",
    )
    async def readyz() -> Ready:
        await service.check_ready()
        return Ready(ready=True)
