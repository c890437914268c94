"""The HTTP interface: parses requests and renders the answers of :mod:`app.graph.service`."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic.json_schema import SkipJsonSchema

from app.graph.service import EnsembleService
from app.http.auth import require_keys
from app.http.classify import ClassifyEndpoint
from app.http.direct import PATH, DirectClassify, TandemAPI
from app.http.errors import ERRORS, add_error_handlers, error_response
from app.http.headers import Headers
from app.http.open_inference import add_open_inference
from app.http.pages import add_pages
from app.messages import Fault
from app.metrics.requests import MeasuredRequests
from app.oip.inference import Inference
from app.responses import Classified, Ready, Results, ServedModels
from app.tracing.http import TracedRequests

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"files": {"type": "array", "items": BINARY["schema"]}},
    }
}
BODY = {"content": {**dict.fromkeys(IMAGE_TYPES, BINARY), "multipart/form-data": FORM}}


def create_api(service: EnsembleService, inference: Inference | None = None) -> TandemAPI:
    """Return the ASGI application in front of ``service``.

    ``inference`` is the service's by the Open Inference Protocol, if gRPC has it too.
    """
    api = TandemAPI(
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
    add_open_inference(api, inference or Inference(service))
    add_pages(api)
    return api


def _add_classify(api: TandemAPI, service: EnsembleService) -> None:
    endpoint = ClassifyEndpoint(service)
    api.direct = DirectClassify(endpoint, service.keys)

    @api.post(
        PATH,
        response_model=Classified | Results,
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, **BODY}},
        summary="Classify the image in the body, or every file of a multipart form",
    )
    async def classify(
        request: Request,
        top_k: Annotated[
            int, Query(description="classes in the answer; of a multi-label set at most")
        ] = endpoint.default_top_k,
        threshold: Annotated[
            float | SkipJsonSchema[None],
            Query(description="of a multi-label set: the least score of a label in the answer"),
        ] = None,
    ) -> Response:
        headers = Headers(request.scope)
        answer = await endpoint.answer(headers, request.receive, top_k, threshold)
        if isinstance(answer, Fault):
            return error_response(answer, headers.request_id)
        return Response(answer, media_type="application/json")


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

    @api.get("/readyz", responses={503: ERRORS[503]}, summary="Every member answers")
    async def readyz() -> Ready:
        await service.check_ready()
        return Ready(ready=True)
