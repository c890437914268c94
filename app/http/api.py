"""The HTTP interface: the middlewares that every request passes, and the routes."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import Response
from opentelemetry import trace
from opentelemetry.trace import Span, format_trace_id
from pydantic.json_schema import SkipJsonSchema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.graph.served_models import ServedModels
from app.graph.service import EnsembleService
from app.http.auth import KeyedRequests, with_security
from app.http.body import ClosedUnread
from app.http.classify import PATH, ClassifyRoute
from app.http.errors import ERRORS, add_error_handlers
from app.http.feedback import add_feedback
from app.http.open_inference import LIVE, READY, add_open_inference
from app.http.origins import AllowedOrigins
from app.http.pages import add_pages
from app.http.traffic import add_traffic
from app.metrics.requests import CLIENT_WENT, record_answered
from app.oip.inference import Inference
from app.responses import Classified, Ready, Results
from app.samples.feedback import Feedback
from app.traffic.control import TrafficControl

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"files": {"type": "array", "items": BINARY["schema"]}},
    }
}
BODY = {"content": {**dict.fromkeys(IMAGE_TYPES, BINARY), "multipart/form-data": FORM}}
ModelSetName = Annotated[
    str | SkipJsonSchema[None], Query(description="of a service with several sets: which one")
]
TRACE_ID_HEADER = b"x-trace-id"
NO_ROUTE = "other"  # the name of unknown paths in metrics, so that a scanner adds no tags


class ObservedRequests:
    """ASGI middleware that records requests; Serve has begun the span of a sampled request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span = trace.get_current_span()
        started, status = time.perf_counter(), 500  # the status if an exception is raised

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
    """Return the path template of the route that answers."""
    return getattr(scope.get("route"), "path", None)


def _name_span(span: Span, scope: Scope, answer: Message) -> None:
    """Name a request's span, set its status, and add the trace id to the answer's headers."""
    route, status = _route_of(scope), answer["status"]
    span.update_name(f"{scope['method']} {route}" if route else scope["method"])
    span.set_attribute("http.response.status_code", status)
    trace_id = format_trace_id(span.get_span_context().trace_id).encode("ascii")
    answer["headers"] = [*answer.get("headers", ()), (TRACE_ID_HEADER, trace_id)]


class TandemAPI(FastAPI):
    """The HTTP interface: an own route for images, and FastAPI for all other routes.

    FastAPI only describes the route for images. All requests pass the same middlewares, which
    record them, handle cross-origin requests and check keys.
    """

    def __init__(self, service: EnsembleService) -> None:
        super().__init__(
            title="Tandem",
            openapi_url=None,  # app.http.pages serves the description and its page
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # redirects would not know the client's scheme
            separate_input_output_schemas=False,
            telemetry={
                "tracing": False,
                "metrics": False,
                "logs": False,
            },  # Serve has the request's
        )
        self.openapi_version = "3.0.3"  # the version that the bundled Swagger UI reads
        self.classify = ClassifyRoute(service)
        self._keys = keys = service.keys
        keyed = KeyedRequests(self._dispatch, keys) if keys else self._dispatch
        origins = service.settings.allowed_origins
        front = AllowedOrigins(keyed, origins) if origins else keyed
        self._front = ClosedUnread(ObservedRequests(front))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)  # a coroutine function: servers ask for that

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description; a service with keys has them in it."""
        return with_security(super().openapi()) if self._keys else super().openapi()

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self.classify.takes(scope):
            return self.classify(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "HEAD":
            return self._answer_head(scope, receive, send)
        return super().__call__(scope, receive, send)

    async def _answer_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a HEAD request as GET, without the content."""
        asked = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            scope["route"] = asked.get("route")  # for the metrics of the request
            await send({**message, "body": b""} if "body" in message else message)

        await super().__call__(asked, receive, send_head)


def create_api(
    service: EnsembleService,
    inference: Inference | None = None,
    feedback: Feedback | None = None,
    traffic: TrafficControl | None = None,
) -> TandemAPI:
    """Return the ASGI application; ``inference`` is the one that gRPC shares, if it does."""
    api = TandemAPI(service)
    add_error_handlers(api)
    _describe_classify(api)
    _add_state(api, service)
    add_feedback(api, service, feedback)
    add_traffic(api, service, traffic)
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
        model_set: ModelSetName = None,
    ) -> Response:
        raise NotImplementedError("ClassifyRoute answers the requests of this route")


def _add_state(api: TandemAPI, service: EnsembleService) -> None:
    @api.get(
        "/v1/models",
        response_model_exclude_none=True,
        responses={404: ERRORS[404]},
        summary="A served set: members, classes, accuracy record",
    )
    async def models(model_set: ModelSetName = None) -> ServedModels:
        return service.of_set(model_set).served_models()

    @api.get("/healthz", summary=LIVE)
    async def healthz() -> Ready:
        return Ready(ready=True)

    @api.get("/readyz", responses={503: ERRORS[503]}, summary=READY)
    async def readyz() -> Ready:
        await service.check_all_ready()
        return Ready(ready=True)
