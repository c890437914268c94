"""The HTTP interface: routes, parameters, errors. What an answer holds is :mod:`app.answers`'."""

import logging
import math
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import swagger_ui_bundle
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from app.answers import Classified, ErrorAnswer, Ready, Results, ServedModels, error_answer
from app.body import read_body, read_files
from app.errors import BadParameterError
from app.lanes import lane_of
from app.metrics.http import MeasuredRequests, timed
from app.request import ClassifyRequest
from app.stages import Fault
from app.timeline import Timeline
from app.tracing.http import TracedRequests
from models.errors import TandemError

if TYPE_CHECKING:
    from app.gateway import Gateway

logger = logging.getLogger("ray.serve")

# Serve counts the same header from a moment earlier and would answer 408 in plain text: be first.
SHARE_OF_TIME = 0.9
PAGE_DIR = Path(__file__).parent / "page"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "not an image, or a damaged one"},
    413: {"model": ErrorAnswer, "description": "too many bytes or files"},
    415: {"model": ErrorAnswer, "description": "an image format that is not decoded"},
    422: {"model": ErrorAnswer, "description": "too many pixels, or a bad parameter"},
    429: {"model": ErrorAnswer, "description": "full; see Retry-After"},
    503: {"model": ErrorAnswer, "description": "not ready"},
    504: {"model": ErrorAnswer, "description": "past its deadline"},
}
IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"files": {"type": "array", "items": BINARY["schema"]}},
    }
}
BODY = {"content": {**dict.fromkeys(IMAGE_TYPES, BINARY), "multipart/form-data": FORM}}


class FreshFiles(StaticFiles):
    """Static files that are asked for again: no old script meets a new page after an upgrade."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def create_api(gateway: "Gateway") -> FastAPI:
    """Return the ASGI application in front of ``gateway``."""
    api = FastAPI(
        title="Tandem",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # Serve has the request's
    )
    api.openapi_version = "3.0.3"  # what the bundled Swagger UI reads
    api.add_middleware(TracedRequests)
    api.add_middleware(MeasuredRequests)
    _add_error_handlers(api)
    _add_classify(api, gateway)
    _add_state(api, gateway)
    _add_pages(api)
    return api


def _add_classify(api: FastAPI, gateway: "Gateway") -> None:
    settings = gateway.settings
    default_k = min(settings.default_top_k, gateway.num_classes)

    @api.post(
        "/v1/classify",
        response_model=Classified | Results,
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, **BODY}},
        summary="Classify the image in the body, or every file of a multipart form",
    )
    async def classify(
        request: Request,
        top_k: Annotated[int, Query(description="classes in the answer")] = default_k,
    ) -> Response:
        timeline = Timeline()
        if not 1 <= top_k <= gateway.num_classes:
            raise BadParameterError(
                f"top_k is {str(top_k)[:40]}; this model set has {gateway.num_classes} classes: "
                f"ask for 1 to {gateway.num_classes}"
            )
        timeout_s = _timeout_s(request, settings.request_timeout_s)
        is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
        request_id = request_id_of(request)
        with gateway.admit():
            with timeline.measure("read") as timeline.reading:
                if is_form:
                    files = await read_files(request, settings.max_body_bytes, settings.max_files)
                else:
                    files = [await read_body(request, settings.max_body_bytes)]
            lane = lane_of(request.headers.get("priority"), len(files))
            results = await gateway.classify(
                ClassifyRequest(files, top_k, timeout_s, request_id, timeline, lane)
            )
        with timed("encode"), timeline.measure("encode"):
            if is_form:
                rows = [error_answer(r, request_id) if isinstance(r, Fault) else r for r in results]
                return _json(Results(results=rows, request_id=request_id))
            if isinstance(results[0], Fault):
                return _error(request, results[0])
            return _json(results[0])


def _add_state(api: FastAPI, gateway: "Gateway") -> None:
    @api.get(
        "/v1/models",
        response_model_exclude_none=True,
        summary="The served set: members, classes, accuracy record",
    )
    async def models() -> ServedModels:
        return gateway.served_models()

    @api.get("/healthz", summary="The Gateway lives")
    async def healthz() -> Ready:
        return Ready(ready=True)

    @api.get("/readyz", responses={503: ERRORS[503]}, summary="Every member answers")
    async def readyz() -> Ready:
        await gateway.check_ready()
        return Ready(ready=True)


def _add_pages(api: FastAPI) -> None:
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE_DIR / "index.html", headers=headers)

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Tandem: HTTP interface",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/page/favicon.svg",
        )

    api.mount("/page", FreshFiles(directory=PAGE_DIR))
    api.mount("/docs/assets", StaticFiles(directory=swagger_ui_bundle.swagger_ui_path))


def _add_error_handlers(api: FastAPI) -> None:
    async def tandem(request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return _error(request, Fault.of(error))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = str(first["loc"][-1])
        text = f"{where} is {str(first.get('input'))[:40]!r}: {first['msg']}; see /docs"
        return _error(request, Fault(422, BadParameterError.code, text))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path}: {error.detail}; see /docs for what there is"
        answer = _error(request, Fault(error.status_code, "http", text))
        answer.headers.update(error.headers or {})  # Allow, for a wrong method
        return answer

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.exception("request %s failed", request_id_of(request), exc_info=error)
        text = "an error inside the service; its log has the details under this request id"
        return _error(request, Fault(500, TandemError.code, text))

    api.add_exception_handler(TandemError, tandem)
    api.add_exception_handler(RequestValidationError, validation)
    api.add_exception_handler(HTTPException, http)
    api.add_exception_handler(Exception, unexpected)


def _error(request: Request, fault: Fault) -> Response:
    headers = {"retry-after": "1"} if fault.status in (429, 503) else None
    answer = error_answer(fault, request_id_of(request))
    return JSONResponse(answer.model_dump(), fault.status, headers)


def _json(answer: Classified | Results) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


def request_id_of(request: Request) -> str:
    """Return the X-Request-ID: the client's own, or the one that Serve made and sends back."""
    return request.headers.get("x-request-id") or uuid.uuid4().hex


def _timeout_s(request: Request, default_s: float) -> float:
    """Return the request's time; the header can only shorten it."""
    given = request.headers.get("x-request-timeout-seconds")
    if given is None:
        return default_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadParameterError(
            f"x-request-timeout-seconds is {given[:40]!r}; give seconds as a number above 0"
        )
    return min(SHARE_OF_TIME * seconds, default_s)
