"""The routes of Triton's shared memory extensions, which only serve local callers."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Scope

from app.errors import BadRegionError
from app.http.errors import CODED, ERRORS, described
from app.http.headers import Headers
from app.http.json_fields import read_fields
from app.oip.documents import ProtocolError, RegionStatus
from app.oip.inference import Inference
from app.oip.regions import Regions
from app.oip.shared_memory import NO_CUDA, asks_for_itself, for_caller, is_loopback

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
NOT_LOCAL: dict[int | str, dict[str, Any]] = {
    403: described(ProtocolError, "shared memory, and a caller that may be elsewhere")
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: described(ProtocolError, "shared memory that is off, gone or too small"),
    **NOT_LOCAL,
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: described(ProtocolError, "no such region")}
REGISTERING: dict[int | str, dict[str, Any]] = {
    **{status: described(ProtocolError, ERRORS[status]["description"]) for status in (408, 413)},
    409: described(ProtocolError, "the region is registered already"),
    415: described(ProtocolError, CODED[415]["description"]),
}
SIZE = {"type": "integer", "minimum": 0}
REGION = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["key", "byte_size"],
                "properties": {"key": {"type": "string"}, "offset": SIZE, "byte_size": SIZE},
            }
        }
    },
}


def is_local(scope: Scope) -> bool:
    """Whether a request is known to come from a program on this machine.

    The connection may be HAProxy's, which then listens on loopback (:mod:`app.launch.haproxy`).
    """
    client, headers = scope.get("client"), Headers(scope)
    if client is None or not is_loopback(client[0]):
        return False
    return asks_for_itself(lambda name: headers.joined(name.encode("ascii")))


def add_shared_memory(api: FastAPI, inference: Inference, tags: list[Any]) -> None:
    """Add the routes; if shared memory is off they answer with an error."""
    _add_status(api, inference, tags)
    _add_register(api, inference, tags)
    _add_unregister(api, inference, tags)
    _add_cuda(api, tags)


def _regions(inference: Inference, request: Request) -> Regions:
    return for_caller(inference.regions, is_local=is_local(request.scope))


def _add_status(api: FastAPI, inference: Inference, tags: list[Any]) -> None:
    @api.get(f"{SYSTEM}/status", tags=tags, responses=REFUSALS, summary="The registered regions")
    async def all_regions(request: Request) -> list[RegionStatus]:
        return _regions(inference, request).status()

    @api.get(
        SYSTEM + "/region/{region_name}/status",
        tags=tags,
        responses=REFUSALS | UNKNOWN,
        summary="One registered region",
    )
    async def one_region(request: Request, region_name: str) -> list[RegionStatus]:
        return _regions(inference, request).status(region_name)


def _add_register(api: FastAPI, inference: Inference, tags: list[Any]) -> None:
    timeout_s = inference.service.settings.request_timeout_s

    @api.post(
        SYSTEM + "/region/{region_name}/register",
        tags=tags,
        responses=REFUSALS | REGISTERING,
        openapi_extra={"requestBody": REGION},
        response_class=Response,
        summary="Register a file of /dev/shm, or a part of one, as a region",
    )
    async def register(request: Request, region_name: str) -> Response:
        regions = _regions(inference, request)
        fields = await read_fields(request, timeout_s, BadRegionError, "key, offset and byte_size")
        numbers = fields.get("offset", 0), fields.get("byte_size")
        regions.register(region_name, fields.get("key"), *numbers)
        return Response()


def _add_unregister(api: FastAPI, inference: Inference, tags: list[Any]) -> None:
    @api.post(
        SYSTEM + "/region/{region_name}/unregister",
        tags=tags,
        responses=REFUSALS,
        response_class=Response,
        summary="Forget a region",
    )
    async def unregister(request: Request, region_name: str) -> Response:
        _regions(inference, request).unregister(region_name)
        return Response()

    @api.post(
        f"{SYSTEM}/unregister",
        tags=tags,
        responses=REFUSALS,
        response_class=Response,
        summary="Forget all regions",
    )
    async def unregister_all(request: Request) -> Response:
        _regions(inference, request).unregister()
        return Response()


def _add_cuda(api: FastAPI, tags: list[Any]) -> None:
    """Add CUDA's routes without any regions, since clients unregister them at their start."""

    @api.get(f"{CUDA}/status", tags=tags, summary="None: see register")
    async def all_regions() -> list[RegionStatus]:
        return []

    @api.get(CUDA + "/region/{region_name}/status", tags=tags, summary="None: see register")
    async def one_region(region_name: str) -> list[RegionStatus]:
        return []

    nothing: dict[str, Any] = {"response_class": Response, "summary": "Nothing to forget"}

    @api.post(f"{CUDA}/unregister", tags=tags, **nothing)
    async def unregister_all() -> Response:
        return Response()

    @api.post(CUDA + "/region/{region_name}/unregister", tags=tags, **nothing)
    async def unregister(region_name: str) -> Response:
        return Response()

    @api.post(
        CUDA + "/region/{region_name}/register",
        tags=tags,
        responses={400: described(ProtocolError, NO_CUDA)},
        response_class=Response,
        summary="Not supported",
    )
    async def register(region_name: str) -> Response:
        raise BadRegionError(NO_CUDA)
