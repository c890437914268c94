"""/v1/models/MODEL and its :predict, the routes of KServe's V1 protocol and TensorFlow Serving."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from app.http.infer import InferEndpoint
from app.metrics.requests import PREDICT, PREDICT_VERSION
from app.oip.documents import ModelReady
from app.oip.inference import Inference
from app.oip.predict import parse_instances, rendered_predictions

FILE = {
    "type": "object",
    "required": ["b64"],
    "properties": {"b64": {"type": "string", "format": "byte"}},
}
REQUEST = {
    "type": "object",
    "required": ["instances"],
    "properties": {
        "instances": {"type": "array", "items": FILE, "minItems": 1},
        "parameters": {"type": "object"},
    },
}
PREDICTION = {
    "type": "object",
    "properties": {
        "probabilities": {"type": "array", "items": {"type": "number"}},
        "label": {},  # a text; with several labels a list
    },
}
ANSWER = {
    "type": "object",
    "required": ["predictions"],
    "properties": {"predictions": {"type": "array", "items": PREDICTION}},
}
EXAMPLE = {"instances": [{"b64": "/9j/4AAQSkZJRgABAQ..."}]}


def add_predict(api: FastAPI, inference: Inference, errors: dict[int | str, Any]) -> None:
    """Add the routes; ``errors`` are the responses documented for inference."""
    endpoint = InferEndpoint(inference, parse_instances, rendered_predictions)
    tags: list[Any] = ["KServe's V1, TensorFlow Serving"]
    described: dict[str, Any] = {
        "tags": tags,
        "summary": "Classify images in base64",
        "responses": {200: {"content": {"application/json": {"schema": ANSWER}}}, **errors},
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": REQUEST, "example": EXAMPLE}},
            }
        },
        "response_class": Response,
    }

    @api.post(PREDICT, **described)
    @api.post(PREDICT_VERSION, **described)
    async def predict(request: Request, model_name: str, model_version: str = "") -> Response:
        model = inference.models.find(model_name, model_version)
        return await endpoint.answer(request.scope, request.receive, model)

    states: dict[int | str, Any] = {status: errors[status] for status in (404, 503)}

    @api.get("/v1/models/{model_name}", tags=tags, responses=states, summary="It answers")
    async def state(model_name: str) -> ModelReady:
        if model_name.endswith(":predict"):  # another route's path with a wrong method
            raise HTTPException(405, headers={"allow": "POST"})
        model = inference.models.find(model_name, "")
        await inference.service.of_set(model.model_set).check_ready()
        return ModelReady(model_name, ready=True)
