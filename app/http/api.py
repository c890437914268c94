"""The HTTP interface: routes and their parameters, parsed and rendered."""

from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from app.graph.parameters import TIMEOUT_HEADER, checked_top_k, parse_timeout_s
from app.graph.request import ClassifyRequest
from app.graph.timeline import Timeline
from app.http.auth import require_keys
from app.http.body import read_body, read_files
from app.http.errors import ERRORS, add_error_handlers, error_response, request_id_of
from app.http.pages import add_pages
from app.messages import Fault
from app.metrics.requests import MeasuredRequests, timed
from app.queueing.byte_budget import Share
from app.queueing.priority import lane_of
from app.responses import Classified, Ready, Results, ServedModels, error_answer
from app.settings import Settings
from app.tracing.http import TracedRequests

if TYPE_CHECKING:
    from app.deployments.gateway import Gateway

# Serve counts the same header from a moment earlier and would answer 408 in plain text: be first.
CLIENT_TIME_SHARE = 0.9
IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"files": {"type": "array", "items": BINARY["schema"]}},
    }
}
BODY = {"content": {**dict.fromkeys(IMAGE_TYPES, BINARY), "multipart/form-data": FORM}}


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
    require_keys(api, gateway.keys)  # the innermost: a refusal is counted too
    api.add_middleware(TracedRequests)
    api.add_middleware(MeasuredRequests)
    add_error_handlers(api)
    _add_classify(api, gateway)
    _add_state(api, gateway)
    add_pages(api)
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
        checked_top_k(top_k, gateway.num_classes)
        timeout_s = _timeout_s(request, settings.request_timeout_s)
        answer_s = min(timeout_s, gateway.answer_timeout_s)
        is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
        request_id = request_id_of(request)
        with gateway.admission.admit(answer_s), gateway.byte_budget.share() as share:
            async with gateway.admission.arriving(timeout_s):
                with timeline.measure("read") as timeline.reading:
                    files = await _files_of(request, is_form, settings, share)
            lane = lane_of(request.headers.get("priority"), len(files))
            in_all_s = min(timeout_s, timeline.elapsed_s() + answer_s)
            results = await gateway.classify(
                ClassifyRequest(files, top_k, in_all_s, request_id, timeline, lane)
            )
        with timed("encode"), timeline.measure("encode"):
            if is_form:
                rows = [error_answer(r, request_id) if isinstance(r, Fault) else r for r in results]
                return _json(Results(results=rows, request_id=request_id))
            if isinstance(results[0], Fault):
                return error_response(request, results[0])
            return _json(results[0])


async def _files_of(
    request: Request, is_form: bool, settings: Settings, share: Share
) -> list[bytes]:
    if is_form:
        return await read_files(request, settings.max_body_bytes, settings.max_files, share)
    return [await read_body(request, settings.max_body_bytes, share)]


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


def _json(answer: Classified | Results) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


def _timeout_s(request: Request, default_s: float) -> float:
    """Return the request's time; the header can only shorten it."""
    given = request.headers.get(TIMEOUT_HEADER)
    return (
        default_s if given is None else min(CLIENT_TIME_SHARE * parse_timeout_s(given), default_s)
    )
