"""The HTTP application: its routes, and the middlewares that every request passes.

They record each request, answer cross-origin requests of browsers (CORS), and check bearer keys
(RFC 6750) before the body is read. HAProxy adds the same CORS headers to its own answers
(app/launch/haproxy_cfg).
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from opentelemetry import trace
from opentelemetry.trace import Span, format_trace_id
from pydantic.json_schema import SkipJsonSchema
from starlette.datastructures import Headers as RequestHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import ANYONE, Caller, Keys
from app.answers import Classified, ErrorAnswer, Ready, Results
from app.changes import ROUTES, UNLISTED, check_change
from app.errors import (
    ADDRESS_HEADER,
    GATEWAYS_HEADER,
    MAX_SHOWN,
    OriginError,
    RateLimitedError,
    UnauthorizedError,
)
from app.graph.request import NormalForm
from app.graph.served_models import ServedModels
from app.graph.service import EnsembleService
from app.http.body import CALLER, ClosedUnread, Headers
from app.http.classify import PATH, ClassifyRoute
from app.http.errors import ERRORS, add_error_handlers, described, is_protocol, response_of
from app.http.open_inference import LIVE, READY_SUMMARY, add_open_inference, sender_of
from app.http.other_routes import (
    add_feedback,
    add_keys,
    add_pages,
    add_samples,
    add_teaching,
    add_traffic,
)
from app.oip.inference import Inference
from app.oip.models import ProtocolError
from app.samples.feedback import Feedback, TaughtFolder
from app.samples.samples import SharedSamples
from app.setting_values import EXPOSED
from app.telemetry.metrics import CLIENT_WENT, record_answered
from app.telemetry.spans import continued, continues_traces
from app.traffic.control import TrafficControl
from models.ensemble import PlanName

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
    str | SkipJsonSchema[None], Query(description="the set, if the service has several")
]
TRACE_ID_HEADER = b"x-trace-id"
METHODS = ("GET", "HEAD", "POST")  # that pages of other origins may use
# All other routes need a key, so new routes do too. Load balancers probe without a key. The page
# must load before it can ask for a key, and its contents are public.
PROBES = frozenset({"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"})
OPEN_PATHS = PROBES | {"/", "/docs", "/openapi.json"}
OPEN_BELOW = ("/page/", "/docs/assets/")
SCHEME = {"type": "http", "scheme": "bearer", "description": "one of the service's keys"}
ADDRESS, GATEWAYS = ADDRESS_HEADER.encode("ascii"), GATEWAYS_HEADER.encode("ascii")
FORWARDED = b"x-forwarded-for"
SENT_KEYS = "tandem.keys"  # in a scope: the values of Authorization
REFUSED = {"401": ERRORS[401]["description"], "403": "what the key may not do"}
NO_ROUTE = "other"  # the name of unknown paths in metrics, so that a scanner adds no tags


class ObservedRequests:
    """ASGI middleware that records requests, and counts them for their keys.

    Serve has begun the span of a sampled request.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

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
            caller: Caller | None = scope.get(CALLER)
            if caller is not None and caller.has_key:
                self._keys.ended(caller, status)


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


class ContinuedTraces:
    """ASGI middleware for the traces that :mod:`app.telemetry.spans` continues."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = reversed(scope.get("headers", []))  # of a repeated one the first
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent}
        with continued(headers):
            await self._app(scope, receive, send)


class TandemAPI(FastAPI):
    """The HTTP interface: an own route for images, and FastAPI for all other routes.

    FastAPI only describes the route for images. All requests pass the same middlewares, which
    record them, handle cross-origin requests and check keys.
    """

    def __init__(self, service: EnsembleService) -> None:
        super().__init__(
            title="Tandem",
            openapi_url=None,  # app.http.other_routes serves the description and its page
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # redirects would not know the client's scheme
            separate_input_output_schemas=False,
            # Serve has the request's.
            telemetry={"tracing": False, "metrics": False, "logs": False},
        )
        self.openapi_version = "3.0.3"  # the version that the bundled Swagger UI reads
        self.classify = ClassifyRoute(service)
        self._form = NormalForm(str.encode)
        self._keys = keys = service.keys
        keyed = KeyedRequests(self._dispatch, keys)
        origins = service.settings.allowed_origins
        front = AllowedOrigins(keyed, origins) if origins else keyed
        observed = ClosedUnread(ObservedRequests(front, keys))
        self._front = ContinuedTraces(observed) if continues_traces() else observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # no later code can log the key
            scope["headers"], scope[SENT_KEYS] = self._form.of(scope["headers"])
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
    taught: TaughtFolder | None = None,
    samples: SharedSamples | None = None,
) -> TandemAPI:
    """Return the ASGI application; ``inference`` is the one that gRPC shares, if it does."""
    api = TandemAPI(service)
    add_error_handlers(api)
    _describe_classify(api)
    _add_state(api, service)
    add_feedback(api, service, feedback, taught)
    add_teaching(api, service, taught)
    add_samples(api, samples)
    add_traffic(api, service, traffic)
    add_keys(api, service)
    add_open_inference(api, inference or Inference(service))
    add_pages(api)
    for route in api.routes:
        if isinstance(route, Route) and changes(route):
            route.app = CheckedChange(route.app, route, service)
    return api


def changes(route: Route) -> bool:
    """Whether a route changes something; one that is not listed is taken for one that does."""
    return any(ROUTES.get(f"{verb} {route.path}", UNLISTED) for verb in route.methods or ())


class CheckedChange:
    """ASGI middleware of a single route: refuses who may not change what the route changes."""

    def __init__(self, app: ASGIApp, route: Route, service: EnsembleService) -> None:
        self._app, self._path, self._service = app, route.path, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, settings = f"{scope['method']} {self._path}", self._service.settings
        origins, has_keys = settings.allowed_origins, bool(self._service.keys)
        who = sender_of(scope), scope.get(CALLER, ANYONE)
        check_change(route, *who, has_keys=has_keys, origins=origins)
        await self._app(scope, receive, send)


def _describe_classify(api: TandemAPI) -> None:
    @api.post(
        PATH,
        response_model=Classified | Results,
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, **BODY}},
        summary="Classify the image in the body, its regions, or every file of a multipart form",
    )
    async def classify(
        top_k: Annotated[
            int, Query(description="number of classes in the answer; in a multi-label set at most")
        ] = api.classify.default_top_k,
        threshold: Annotated[
            float | SkipJsonSchema[None],
            Query(description="multi-label sets only: lowest score of a listed label"),
        ] = None,
        model_set: ModelSetName = None,
        plan: Annotated[
            PlanName | SkipJsonSchema[None],
            Query(
                description="full asks every member, fast fewer where fewer suffice (the set's "
                "fast plan); the service's own without it"
            ),
        ] = None,
        answer_set: Annotated[
            bool,
            Query(description="also list the classes that hold the right one in 95 % of cases"),
        ] = False,
        regions: Annotated[
            str | SkipJsonSchema[None],
            Query(
                description="JSON [[x, y, width, height], ...], at most 64: parts of the picture "
                "as it is shown, in pixels, or in shares of its sides if all four are at most 1; "
                "the answer has a result for each"
            ),
        ] = None,
        embedding: Annotated[
            str | SkipJsonSchema[None],
            Query(description="a member, whose pooled features the answer has as embedding"),
        ] = None,
    ) -> Response:
        raise NotImplementedError("ClassifyRoute answers the requests of this route")


def _add_state(api: TandemAPI, service: EnsembleService) -> None:
    @api.get(
        "/v1/models",
        response_model_exclude_none=True,
        responses={404: ERRORS[404]},
        summary="A served set: members, classes, accuracy record",
    )
    async def models(request: Request, model_set: ModelSetName = None) -> ServedModels:
        served = service.of_set(model_set).served_models()
        shows_hints = service.settings.operator_hints
        if sender_of(request.scope).is_local if shows_hints is None else shows_hints:
            served.operator_hints = True
        else:
            served.hint = ""
        return served

    @api.get("/healthz", summary=LIVE)
    async def healthz() -> Ready:
        return Ready(ready=True)

    @api.get("/readyz", responses={503: ERRORS[503]}, summary=READY_SUMMARY)
    @api.get("/ping", responses={503: ERRORS[503]}, summary=f"{READY_SUMMARY} (SageMaker)")
    async def readyz() -> Ready:
        await service.check_all_ready()
        return Ready(ready=True)


class AllowedOrigins(CORSMiddleware):
    """Answers preflight requests, which have no key, and adds headers to all other answers."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(app, origins, METHODS, allow_headers=("*",), expose_headers=EXPOSED)

    def preflight_response(self, request_headers: RequestHeaders) -> Response:
        """Return Starlette's answer; refusals get the service's error form."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        origin, method = (
            request_headers.get(name, "")[:MAX_SHOWN]
            for name in ("origin", "access-control-request-method")
        )
        text = (
            f"a page of {origin!r} may not send {method}: the service's allowed_origins name the "
            f"pages that may, and they may send {', '.join(METHODS)}"
        )
        scope = {"path": "", "headers": request_headers.raw}  # all that Starlette passes on
        refusal = response_of(scope, OriginError(text))
        del answer.headers["content-length"], answer.headers["content-type"]
        refusal.headers.update(answer.headers)
        return refusal


class KeyedRequests:
    """ASGI middleware that finds out whose request it is, before its body is read.

    It answers 401 without a key, and 429 beyond the key's rate. Without keys, callers are known by
    their addresses.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys, self._has_keys = app, keys, bool(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        sent = [value.decode("latin-1") for value in scope[SENT_KEYS]]
        limits: Mapping[str, str] = {}
        try:
            caller = scope[CALLER] = self._caller(scope, sent)
            if caller.rate is not None:
                limits = self._keys.take(caller, Headers(scope).text(GATEWAYS))
        except (UnauthorizedError, RateLimitedError) as error:
            answer = response_of(scope, error)
            if isinstance(error, UnauthorizedError):
                problem = ', error="invalid_token"' if error.is_given else ""
                answer.headers["www-authenticate"] = f'Bearer realm="tandem"{problem}'
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, with_headers(send, limits) if limits else send)

    def _caller(self, scope: Scope, sent: Sequence[str]) -> Caller:
        if self._has_keys:
            return self._keys.check(sent)
        headers = Headers(scope)
        if not (address := headers.text(ADDRESS)) and (client := scope.get("client")):
            address = client[0]
        forwarded = headers.joined(FORWARDED) or "" if self._keys.proxies else ""
        # Known ones are found here: the way of a photo has as few files as possible.
        known = self._keys.by_address.get((address, forwarded))
        return known or self._keys.check(sent, address, forwarded)


def with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return ``send`` for an answer that has further headers."""
    more = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return send_more


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPEN_BELOW)


def with_security(description: dict[str, Any]) -> dict[str, Any]:
    """Add the key to the operations of the OpenAPI description that need it."""
    description["components"].setdefault("securitySchemes", {})["key"] = SCHEME
    for path, operations in description["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
                form = ProtocolError if is_protocol({"path": path}) else ErrorAnswer
                for status, text in REFUSED.items():
                    operation["responses"].setdefault(status, described(form, text))
    return description
