"""The routes of the Open Inference Protocol, below /v2, and of KServe's V1 protocol.

Those of V2 are health, metadata, statistics, inference, and Triton's extensions: the model
repository, and shared memory, which serves local callers alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.types import Scope

from app.answers import Fault, Ready
from app.changes import Sender, is_loopback
from app.errors import BadRegionError, BadTensorError
from app.http.body import Headers, read_coded_body, read_fields
from app.http.classify import WatchedRequest, request_options
from app.http.errors import (
    CODED,
    ERRORS,
    Responses,
    array_of,
    described,
    error_response,
    json_body,
    object_of,
)
from app.oip.bodies import (
    HEADER_LENGTH,
    InferAnswer,
    ModelStatus,
    Prediction,
    metadata_of,
    parse_request,
    parsed_object,
    rendered,
    status_of,
)
from app.oip.inference import Inference, ModelRequest
from app.oip.models import (
    AllStatistics,
    IndexEntry,
    Live,
    ModelConfiguration,
    ModelMetadata,
    ModelReady,
    ProtocolError,
    RegionStatus,
    ServerMetadata,
    server_metadata,
)
from app.oip.regions import NO_CUDA, Regions, for_caller
from app.oip.tensors import InferRequest
from app.queueing.admission import Share
from app.telemetry.metrics import (
    INFER,
    INFER_VERSION,
    INVOCATIONS,
    PREDICT,
    PREDICT_VERSION,
    RequestObserver,
)

LENGTH = HEADER_LENGTH.encode("ascii")
MODEL_PATH = "/v2/models/{model_name}"
VERSION = MODEL_PATH + "/versions/{model_version}"
LIVE, READY_SUMMARY = "Whether the Gateway runs", "Whether enough members answer"
CONFIGURATION = "Triton's model configuration"
SIGNATURE = "A model's inputs and outputs as a signature"
TAGS: list[Any] = ["Open Inference Protocol (KServe's V2)"]
NO_MODEL: Responses = {404: described(ProtocolError, "no such model or version")}
NOT_READY: Responses = {503: described(ProtocolError, "a member does not answer")}
NOT_LOCAL: Responses = {
    403: described(ProtocolError, "shared memory, and a caller that may be elsewhere")
}
INFER_ERRORS: Responses = (
    {status: described(ProtocolError, error["description"]) for status, error in ERRORS.items()}
    | NO_MODEL
    | NOT_LOCAL
    | {504: ERRORS[504] | {"model": ProtocolError}}
)
INFER_ERRORS[400]["description"] = "a request that does not hold together, or an image that is none"
TEXT, OBJECT, SIZE = {"type": "string"}, {"type": "object"}, {"type": "integer", "minimum": 0}
TENSOR = object_of(
    {
        "name": {"type": "string", "enum": ["image", "pixels"]},
        "datatype": {"type": "string", "enum": ["BYTES", "UINT8"]},
        "shape": array_of(SIZE),
        "parameters": OBJECT,
        "data": array_of({}),
    },
    *("name", "datatype", "shape"),
)
OUTPUT = object_of(
    {"name": {"type": "string", "enum": ["probabilities", "label"]}, "parameters": OBJECT}, "name"
)
INFER_SCHEMA = object_of(
    {
        "id": TEXT,
        "parameters": OBJECT,
        "inputs": array_of(TENSOR, minItems=1),
        "outputs": array_of(OUTPUT),
    },
    "inputs",
)
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "required": True,
    "description": "JSON, and after it the binary tensors; "
    f"{HEADER_LENGTH} is the length of the JSON (0: the body is one encoded image)",
    "content": {"application/json": {"schema": INFER_SCHEMA}, "application/octet-stream": BINARY},
}
ANSWERED = {
    "description": "the outputs; binary ones after the JSON",
    "content": {"application/json": {"schema": OBJECT}, "application/octet-stream": BINARY},
}


def sender_of(scope: Scope) -> Sender:
    """Return who sent a request."""
    client, headers = scope.get("client"), Headers(scope)
    is_here = client is not None and is_loopback(client[0])
    return Sender(is_here, lambda name: headers.joined(name.encode("ascii")))


def add_open_inference(api: FastAPI, inference: Inference) -> None:
    """Add the protocol's routes."""
    _add_server(api, inference)
    add_shared_memory(api, inference)
    add_cuda_shared_memory(api)
    add_repository(api, inference)
    _add_statistics(api, inference)
    _add_models(api, inference)
    _add_infer(api, inference)
    add_predict(api, inference)


def _add_server(api: FastAPI, inference: Inference) -> None:
    service = inference.service

    @api.get("/v2", tags=TAGS, summary="The server and its extensions of the protocol")
    async def server() -> ServerMetadata:
        return server_metadata(has_shared_memory=inference.regions is not None)

    @api.get("/v2/health/live", tags=TAGS, summary=LIVE)
    async def live() -> Live:
        return Live(live=True)

    @api.get("/v2/health/ready", tags=TAGS, responses=NOT_READY, summary=READY_SUMMARY)
    async def ready() -> Ready:
        await service.check_all_ready()
        return Ready(ready=True)


def _add_models(api: FastAPI, inference: Inference) -> None:
    service = inference.service

    @api.get(MODEL_PATH, tags=TAGS, responses=NO_MODEL, summary="A model's inputs and outputs")
    @api.get(VERSION, tags=TAGS, responses=NO_MODEL, summary="A version's inputs and outputs")
    async def metadata(model_name: str, model_version: str = "") -> ModelMetadata:
        return inference.models.find(model_name, model_version).metadata()

    @api.get(f"{MODEL_PATH}/config", tags=TAGS, responses=NO_MODEL, summary=CONFIGURATION)
    @api.get(f"{VERSION}/config", tags=TAGS, responses=NO_MODEL, summary=CONFIGURATION)
    async def configuration(model_name: str, model_version: str = "") -> ModelConfiguration:
        return inference.configuration(inference.models.find(model_name, model_version))

    @api.get(f"{MODEL_PATH}/ready", tags=TAGS, responses=NO_MODEL | NOT_READY, summary="Readiness")
    @api.get(f"{VERSION}/ready", tags=TAGS, responses=NO_MODEL | NOT_READY, summary="Readiness")
    async def model_ready(model_name: str, model_version: str = "") -> ModelReady:
        model = inference.models.find(model_name, model_version)
        await service.of_set(model.model_set).check_ready()
        return ModelReady(model_name, ready=True)


def _add_statistics(api: FastAPI, inference: Inference) -> None:
    """Add the statistics before the models' routes: ``stats`` must not be taken for a model."""

    @api.get("/v2/models/stats", tags=TAGS, summary="Inference statistics of all models")
    async def all_statistics() -> AllStatistics:
        return inference.statistics()

    @api.get(f"{MODEL_PATH}/stats", tags=TAGS, responses=NO_MODEL, summary="Inference statistics")
    @api.get(f"{VERSION}/stats", tags=TAGS, responses=NO_MODEL, summary="Inference statistics")
    async def statistics(model_name: str, model_version: str = "") -> AllStatistics:
        return inference.statistics(inference.models.find(model_name, model_version))


Parse = Callable[[bytes, str | None], InferRequest]
Render = Callable[[InferAnswer], tuple[bytes, int | None]]


async def _answered(
    inference: Inference,
    request: Request,
    names: tuple[str, str],
    parse: Parse = parse_request,
    render: Render = rendered,
) -> Response:
    """Return the response of the model with the name and version ``names``.

    ``render`` returns the body, and the length of its JSON if tensors follow it.

    Raises:
        TandemError: the request fails as a whole.
    """
    scope, observer = request.scope, RequestObserver()
    headers, model = Headers(scope), inference.models.find(*names)
    limits = inference.service.settings
    options = request_options(headers, limits.traffic_header, model_set=model.model_set)
    with WatchedRequest(request.receive) as watched:

        async def read(share: Share) -> ModelRequest:
            body = await read_coded_body(watched, headers, limits.max_body_bytes, share)
            asked, regions = parse(body, headers.get(LENGTH)), None
            if asked.uses_regions:
                regions = for_caller(inference.regions, is_local=sender_of(scope).is_local)
            return ModelRequest(model, asked, regions)

        answer = await inference.exchange(options, observer, read)
    if isinstance(answer, Fault):
        return error_response(scope, answer)
    start_ms = observer.elapsed_ms()
    content, num_json = render(answer)
    observer.stage_ended("encode", start_ms)
    if num_json is None:
        return Response(content, media_type="application/json")
    return Response(content, 200, {HEADER_LENGTH: str(num_json)}, "application/octet-stream")


def _add_infer(api: FastAPI, inference: Inference) -> None:
    described: dict[str, Any] = {
        "tags": TAGS,
        "responses": {200: ANSWERED, **INFER_ERRORS},
        "openapi_extra": {"requestBody": BODY},
        "response_class": Response,
    }

    @api.post(INFER, summary="Classify images, encoded or decoded", **described)
    @api.post(INFER_VERSION, summary="Classify images, encoded or decoded", **described)
    async def infer(request: Request, model_name: str, model_version: str = "") -> Response:
        return await _answered(inference, request, (model_name, model_version))


FILE = object_of({"b64": {"type": "string", "format": "byte"}}, "b64")
PREDICT_SCHEMA = object_of(
    {"instances": array_of(FILE, minItems=1), "inputs": OBJECT, "parameters": OBJECT}
)
PREDICTION = object_of(
    {"probabilities": array_of({"type": "number"}), "label": {}}  # several labels are a list
)
ANSWER = object_of({"predictions": array_of(PREDICTION), "outputs": OBJECT})
EXAMPLE = {"instances": [{"b64": "/9j/4AAQSkZJRgABAQ..."}]}
V1_PATH = "/v1/models/{model_name}"
V1_VERSION = V1_PATH + "/versions/{model_version}"
V1_TAGS: list[Any] = ["KServe's V1, TensorFlow Serving"]


def add_predict(api: FastAPI, inference: Inference) -> None:
    """Add the routes of TensorFlow Serving, which KServe's V1 protocol shares."""
    described: dict[str, Any] = {
        "tags": V1_TAGS,
        "summary": "Classify images in base64",
        "responses": {200: {"content": {"application/json": {"schema": ANSWER}}}, **INFER_ERRORS},
        "openapi_extra": json_body(PREDICT_SCHEMA, EXAMPLE),
        "response_class": Response,
    }

    @api.post(PREDICT, **described)
    @api.post(PREDICT_VERSION, **described)
    async def predict(request: Request, model_name: str, model_version: str = "") -> Response:
        names, asked = (model_name, model_version), Prediction()
        return await _answered(inference, request, names, asked.parse, asked.render)

    @api.post(V1_PATH, include_in_schema=False)
    @api.post(V1_VERSION, include_in_schema=False)
    async def other_verb() -> None:  # as :classify and :explain
        raise HTTPException(405, "POST is for NAME:predict alone", {"allow": "GET, HEAD"})

    # Other bodies come to ClassifyRoute.
    kinds = ("image/jpeg", "image/png", "application/octet-stream")
    content: dict[str, Any] = dict.fromkeys(kinds, BINARY)
    content["application/json"] = {"schema": PREDICT_SCHEMA, "example": EXAMPLE}

    @api.post(
        INVOCATIONS,
        tags=["SageMaker, Vertex AI"],
        summary="Classify an image, or images in base64 by the first set",
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, "content": content}},
        response_class=Response,
    )
    async def invocations(request: Request) -> Response:
        names, asked = (inference.models.all[0].name, ""), Prediction()
        return await _answered(inference, request, names, asked.parse, asked.render)

    @api.get(f"{V1_PATH}/metadata", tags=V1_TAGS, responses=NO_MODEL, summary=SIGNATURE)
    @api.get(f"{V1_VERSION}/metadata", tags=V1_TAGS, responses=NO_MODEL, summary=SIGNATURE)
    async def metadata(model_name: str, model_version: str = "") -> dict[str, Any]:
        return metadata_of(inference.models.find(model_name, model_version))

    @api.get(V1_PATH, tags=V1_TAGS, responses=NO_MODEL | NOT_READY, summary="Status")
    @api.get(V1_VERSION, tags=V1_TAGS, responses=NO_MODEL | NOT_READY, summary="Status")
    async def status(model_name: str, model_version: str = "") -> ModelStatus:
        if (model_version or model_name).endswith(":predict"):  # a wrong method of its route
            raise HTTPException(405, headers={"allow": "POST"})
        model = inference.models.find(model_name, model_version)
        await inference.service.of_set(model.model_set).check_ready()
        return status_of(model)


REPOSITORY_PATH = "/v2/repository/models/{model_name}"
DESCRIPTIONS = {
    400: "a body that is no JSON",
    **{status: str(ERRORS[status]["description"]) for status in (408, 413)},
    415: str(CODED[415]["description"]),
    403: "no keys, and a caller that may be elsewhere",
    404: "no such set",
    422: "the default set, stages that are deployments, or a parameter that is not taken",
    503: "some Gateways do not follow yet",
}
REFUSALS: Responses = {
    status: described(ProtocolError, text) for status, text in DESCRIPTIONS.items()
}
UNSERVABLE: Responses = {500: described(ProtocolError, "a set that cannot be served")}
PARAMETERS = object_of({"parameters": OBJECT})
READY_FIELDS = object_of({"ready": {"type": "boolean"}})


def add_repository(api: FastAPI, inference: Inference) -> None:
    """Add the routes; ``inference`` has the models and loads sets."""
    timeout_s = inference.service.settings.request_timeout_s

    async def read(request: Request, wanted: str) -> dict[str, Any]:
        return await read_fields(request, timeout_s, BadTensorError, wanted, may_be_empty=True)

    async def parameters_of(request: Request) -> Mapping[str, Any]:
        fields = await read(request, '{"parameters": {}}, or nothing')
        return parsed_object(fields.get("parameters", {}), "parameters")

    @api.post(
        "/v2/repository/index",
        tags=TAGS,
        responses={status: REFUSALS[status] for status in (400, 408, 413, 415)},
        openapi_extra=json_body(READY_FIELDS, is_required=False),
        summary="The models and their states; ready: only those that answer",
    )
    async def index(request: Request) -> list[IndexEntry]:
        fields = await read(request, '{"ready": true}, or nothing')
        only_ready = fields.get("ready") is True
        return inference.repository.index(inference.models, only_ready=only_ready)

    described: dict[str, Any] = {
        "tags": TAGS,
        "openapi_extra": json_body(PARAMETERS, is_required=False),
        "response_class": Response,
    }

    @api.post(
        f"{REPOSITORY_PATH}/load",
        responses=REFUSALS | UNSERVABLE,
        summary="Load a set as it is in its folder now",
        **described,
    )
    async def load(request: Request, model_name: str) -> Response:
        await inference.repository.load(model_name, await parameters_of(request))
        return Response()

    @api.post(f"{REPOSITORY_PATH}/unload", responses=REFUSALS, summary="Unload a set", **described)
    async def unload(request: Request, model_name: str) -> Response:
        await inference.repository.unload(model_name, await parameters_of(request))
        return Response()


SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION_REFUSALS: Responses = {
    400: described(ProtocolError, "shared memory that is off, gone or too small"),
    **NOT_LOCAL,
}
NO_REGION: Responses = {404: described(ProtocolError, "no such region")}
REGISTERING: Responses = {
    **{status: described(ProtocolError, ERRORS[status]["description"]) for status in (408, 413)},
    409: described(ProtocolError, "the region is registered already"),
    415: described(ProtocolError, CODED[415]["description"]),
}
REGION = json_body(object_of({"key": TEXT, "offset": SIZE, "byte_size": SIZE}, "key", "byte_size"))


def add_shared_memory(api: FastAPI, inference: Inference) -> None:
    """Add the routes; if shared memory is off they answer with an error."""
    timeout_s = inference.service.settings.request_timeout_s
    described: dict[str, Any] = {"tags": TAGS, "responses": REGION_REFUSALS}
    empty = described | {"response_class": Response}

    def regions_for(request: Request) -> Regions:
        return for_caller(inference.regions, is_local=sender_of(request.scope).is_local)

    @api.get(f"{SYSTEM}/status", summary="The registered regions", **described)
    async def all_regions(request: Request) -> list[RegionStatus]:
        return regions_for(request).status()

    @api.get(
        SYSTEM + "/region/{region_name}/status",
        tags=TAGS,
        responses=REGION_REFUSALS | NO_REGION,
        summary="One registered region",
    )
    async def one_region(request: Request, region_name: str) -> list[RegionStatus]:
        return regions_for(request).status(region_name)

    @api.post(
        SYSTEM + "/region/{region_name}/register",
        tags=TAGS,
        responses=REGION_REFUSALS | REGISTERING,
        openapi_extra=REGION,
        response_class=Response,
        summary="Register a file of /dev/shm, or a part of one, as a region",
    )
    async def register(request: Request, region_name: str) -> Response:
        regions = regions_for(request)
        fields = await read_fields(request, timeout_s, BadRegionError, "key, offset and byte_size")
        numbers = fields.get("offset", 0), fields.get("byte_size")
        regions.register(region_name, fields.get("key"), *numbers)
        return Response()

    @api.post(SYSTEM + "/region/{region_name}/unregister", summary="Forget a region", **empty)
    async def unregister(request: Request, region_name: str) -> Response:
        regions_for(request).unregister(region_name)
        return Response()

    @api.post(f"{SYSTEM}/unregister", summary="Forget all regions", **empty)
    async def unregister_all(request: Request) -> Response:
        regions_for(request).unregister()
        return Response()


def add_cuda_shared_memory(api: FastAPI) -> None:
    """Add CUDA's routes without any regions, since clients unregister them at their start."""

    @api.get(f"{CUDA}/status", tags=TAGS, summary="None: see register")
    async def all_regions() -> list[RegionStatus]:
        return []

    @api.get(CUDA + "/region/{region_name}/status", tags=TAGS, summary="None: see register")
    async def one_region(region_name: str) -> list[RegionStatus]:
        return []

    nothing: dict[str, Any] = {"response_class": Response, "summary": "Nothing to forget"}

    @api.post(f"{CUDA}/unregister", tags=TAGS, **nothing)
    async def unregister_all() -> Response:
        return Response()

    @api.post(CUDA + "/region/{region_name}/unregister", tags=TAGS, **nothing)
    async def unregister(region_name: str) -> Response:
        return Response()

    @api.post(
        CUDA + "/region/{region_name}/register",
        tags=TAGS,
        responses={400: described(ProtocolError, NO_CUDA)},
        response_class=Response,
        summary="Not supported",
    )
    async def register(region_name: str) -> Response:
        raise BadRegionError(NO_CUDA)
