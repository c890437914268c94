"""The HTTP interface: parses requests and renders the answers of :mod:`app.graph.service`."""

from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from app.graph.intake import RequestBody, RequestOptions
from app.graph.parameters import TIMEOUT_HEADER, parse_timeout_s
from app.graph.request import RequestAnswers
from app.graph.service import EnsembleService
from app.graph.timeline import Timeline
from app.http.auth import require_keys
from app.http.body import read_body, read_files
from app.http.errors import ERRORS, add_error_handlers, error_response, request_id_of
from app.http.pages import add_pages
from app.messages import Fault
from app.metrics.requests import MeasuredRequests
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import REFUSED_HEADER, refused_before
from app.responses import Classified, Ready, Results, ServedModels, error_answer
from app.tracing.http import TracedRequests

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


def create_api(service: EnsembleService) -> FastAPI:
    """Return the ASGI application in front of ``service``."""
    api = FastAPI(
        title="Tandem",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # Serve has the request's
    )
    api.openapi_version = "3.0.3"  # what the bundled Swagger UI reads
    require_keys(api, service.keys)  # the innermost: a refusal is counted too
    api.add_middleware(TracedRequests)
    api.add_middleware(MeasuredRequests)
    add_error_handlers(api)
    _add_classify(api, service)
    _add_state(api, service)
    add_pages(api)
    return api


def _add_classify(api: FastAPI, service: EnsembleService) -> None:
    settings = service.settings
    default_k = min(settings.default_top_k, service.num_classes)

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
        is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
        headers = request.headers
        options = RequestOptions(
            request_id_of(request),
            top_k,
            _timeout_s(request),
            headers.get("priority"),
            refused_before(headers.get(REFUSED_HEADER)),
        )

        async def read(share: Share) -> RequestBody:
            limit = settings.max_body_bytes
            if is_form:
                return RequestBody(await read_files(request, limit, settings.max_files, share))
            return RequestBody([await read_body(request, limit, share)])

        answers = await service.answer(read, options, timeline)
        with timeline.encoding():
            return _form_of(answers, options) if is_form else _image_of(answers[0], request)


def _form_of(answers: RequestAnswers, options: RequestOptions) -> Response:
    request_id = options.request_id
    rows = [error_answer(a, request_id) if isinstance(a, Fault) else a for a in answers]
    return _json(Results(results=rows, request_id=request_id))


def _image_of(answer: Classified | Fault, request: Request) -> Response:
    return error_response(request, answer) if isinstance(answer, Fault) else _json(answer)


def _add_state(api: FastAPI, service: EnsembleService) -> None:
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

    @api.get("/readyz", responses={503: ERRORS[503]}, summary="Every member answers")
    async def readyz() -> Ready:
        await service.check_ready()
        return Ready(ready=True)


def _json(answer: Classified | Results) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


def _timeout_s(request: Request) -> float | None:
    """Return the time that the client gives its request, in seconds; None if it does not."""
    given = request.headers.get(TIMEOUT_HEADER)
    return None if given is None else CLIENT_TIME_SHARE * parse_timeout_s(given)
