"""The routes of the Open Inference Protocol, below /v2: health, metadata, inference, statistics."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from app.http.errors import ERRORS, described
from app.http.infer import InferEndpoint
from app.http.predict import add_predict
from app.http.repository import add_repository
from app.http.shared_memory import NOT_LOCAL, add_shared_memory
from app.metrics.requests import INFER, INFER_VERSION
from app.oip.documents import (
    AllStatistics,
    Live,
    ModelMetadata,
    ModelReady,
    ProtocolError,
    ServerMetadata,
)
from app.oip.inference import Inference
from app.oip.json_body import HEADER_LENGTH
from app.oip.models import server_metadata
from app.responses import Ready

MODEL = "/v2/models/{model_name}"
VERSION = MODEL + "/versions/{model_version}"
LIVE, READY = "The Gateway lives", "As many members answer as answer_policy wants"
TAGS: list[Any] = ["Open Inference Protocol (KServe's V2)"]
NO_MODEL: dict[int | str, dict[str, Any]] = {
    404: described(ProtocolError, "no such model or version")
}
NOT_READY: dict[int | str, dict[str, Any]] = {
    503: described(ProtocolError, "a member does not answer")
}
INFER_ERRORS: dict[int | str, dict[str, Any]] = (
    {status: described(ProtocolError, error["description"]) for status, error in ERRORS.items()}
    | NO_MODEL
    | NOT_LOCAL
    | {504: ERRORS[504] | {"model": ProtocolError}}
)
INFER_ERRORS[400]["description"] = "a request that does not hold together, or an image that is none"
TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string", "enum": ["image", "pixels"]},
        "datatype": {"type": "string", "enum": ["BYTES", "UINT8"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
OUTPUT = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "enum": ["probabilities", "label"]},
        "parameters": {"type": "object"},
    },
}
REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": TENSOR, "minItems": 1},
        "outputs": {"type": "array", "items": OUTPUT},
    },
}
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "required": True,
    "description": "JSON, and after it the binary tensors; "
    f"{HEADER_LENGTH} is the length of the JSON (0: the body is one encoded image)",
    "content": {"application/json": {"schema": REQUEST}, "application/octet-stream": BINARY},
}
ANSWERED = {
    "description": "the outputs; binary ones after the JSON",
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "application/octet-stream": BINARY,
    },
}


def add_open_inference(api: FastAPI, inference: Inference) -> None:
    """Add the protocol's routes."""
    _add_server(api, inference)
    add_shared_memory(api, inference, TAGS)
    add_repository(api, inference, TAGS)
    _add_statistics(api, inference)
    _add_models(api, inference)
    _add_infer(api, InferEndpoint(inference), inference)
    add_predict(api, inference, INFER_ERRORS)


def _add_server(api: FastAPI, inference: Inference) -> None:
    service = inference.service

    @api.get("/v2", tags=TAGS, summary="The server, and the extensions of the protocol it has")
    async def server() -> ServerMetadata:
        return server_metadata(has_shared_memory=inference.regions is not None)

    @api.get("/v2/health/live", tags=TAGS, summary=LIVE)
    async def live() -> Live:
        return Live(live=True)

    @api.get("/v2/health/ready", tags=TAGS, responses=NOT_READY, summary=READY)
    async def ready() -> Ready:
        await service.check_all_ready()
        return Ready(ready=True)


def _add_models(api: FastAPI, inference: Inference) -> None:
    service = inference.service

    @api.get(MODEL, tags=TAGS, responses=NO_MODEL, summary="A model's inputs and outputs")
    @api.get(VERSION, tags=TAGS, responses=NO_MODEL, summary="A version's inputs and outputs")
    async def metadata(model_name: str, model_version: str = "") -> ModelMetadata:
        return inference.models.find(model_name, model_version).metadata()

    @api.get(f"{MODEL}/ready", tags=TAGS, responses=NO_MODEL | NOT_READY, summary="It answers")
    @api.get(f"{VERSION}/ready", tags=TAGS, responses=NO_MODEL | NOT_READY, summary="It answers")
    async def model_ready(model_name: str, model_version: str = "") -> ModelReady:
        model = inference.models.find(model_name, model_version)
        await service.of_set(model.model_set).check_ready()
        return ModelReady(model_name, ready=True)


def _add_statistics(api: FastAPI, inference: Inference) -> None:
    """Add the statistics before the models' routes: ``stats`` must not be taken for a model."""

    @api.get("/v2/models/stats", tags=TAGS, summary="What every model answered by this protocol")
    async def all_statistics() -> AllStatistics:
        return inference.statistics()

    @api.get(f"{MODEL}/stats", tags=TAGS, responses=NO_MODEL, summary="What one model answered")
    @api.get(f"{VERSION}/stats", tags=TAGS, responses=NO_MODEL, summary="What one model answered")
    async def statistics(model_name: str, model_version: str = "") -> AllStatistics:
        return inference.statistics(inference.models.find(model_name, model_version))


def _add_infer(api: FastAPI, endpoint: InferEndpoint, inference: Inference) -> None:
    described: dict[str, Any] = {
        "tags": TAGS,
        "responses": {200: ANSWERED, **INFER_ERRORS},
        "openapi_extra": {"requestBody": BODY},
        "response_class": Response,
    }

    @api.post(INFER, summary="Classify images, encoded or decoded", **described)
    @api.post(INFER_VERSION, summary="Classify images, encoded or decoded", **described)
    async def infer(request: Request, model_name: str, model_version: str = "") -> Response:
        model = inference.models.find(model_name, model_version)
        return await endpoint.answer(request.scope, request.receive, model)
