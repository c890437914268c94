"""The routes of Triton's model repository extension."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from app.errors import BadTensorError
from app.http.errors import CODED, ERRORS, described
from app.http.json_fields import read_fields
from app.http.shared_memory import is_local
from app.oip.documents import IndexEntry, ProtocolError
from app.oip.inference import Inference
from app.oip.json_body import parsed_object

MODEL = "/v2/repository/models/{model_name}"
DESCRIPTIONS = {
    400: "a body that is no JSON",
    **{status: str(ERRORS[status]["description"]) for status in (408, 413)},
    415: str(CODED[415]["description"]),
    403: "no keys, and a caller that may be elsewhere",
    404: "no such set",
    422: "the default set, stages that are deployments, or a parameter that is not taken",
    503: "some Gateways do not follow yet",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: described(ProtocolError, text) for status, text in DESCRIPTIONS.items()
}
UNSERVABLE: dict[int | str, dict[str, Any]] = {
    500: described(ProtocolError, "a set that cannot be served")
}
PARAMETERS = {"type": "object", "properties": {"parameters": {"type": "object"}}}
READY = {"type": "object", "properties": {"ready": {"type": "boolean"}}}


def add_repository(api: FastAPI, inference: Inference, tags: list[Any]) -> None:
    """Add the routes; ``inference`` has the models and loads sets."""
    timeout_s = inference.service.settings.request_timeout_s

    async def read(request: Request, wanted: str) -> dict[str, Any]:
        return await read_fields(request, timeout_s, BadTensorError, wanted, may_be_empty=True)

    async def parameters_of(request: Request) -> Mapping[str, Any]:
        fields = await read(request, '{"parameters": {}}, or nothing')
        return parsed_object(fields.get("parameters", {}), "parameters")

    @api.post(
        "/v2/repository/index",
        tags=tags,
        responses={status: REFUSALS[status] for status in (400, 408, 413, 415)},
        openapi_extra=_body(READY),
        summary="The models and their states; ready: only those that answer",
    )
    async def index(request: Request) -> list[IndexEntry]:
        fields = await read(request, '{"ready": true}, or nothing')
        only_ready = fields.get("ready") is True
        return inference.repository.index(inference.models, only_ready=only_ready)

    described: dict[str, Any] = {
        "tags": tags,
        "openapi_extra": _body(PARAMETERS),
        "response_class": Response,
    }

    @api.post(
        f"{MODEL}/load",
        responses=REFUSALS | UNSERVABLE,
        summary="Serve a set, as its folder has it now",
        **described,
    )
    async def load(request: Request, model_name: str) -> Response:
        parameters = await parameters_of(request)
        local = is_local(request.scope)
        await inference.repository.load(model_name, parameters, is_local=local)
        return Response()

    @api.post(f"{MODEL}/unload", responses=REFUSALS, summary="Serve a set no more", **described)
    async def unload(request: Request, model_name: str) -> Response:
        parameters = await parameters_of(request)
        local = is_local(request.scope)
        await inference.repository.unload(model_name, parameters, is_local=local)
        return Response()


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}
