"""GET and PUT /v1/traffic: shows and changes the traffic between versions of a set."""

from typing import Any

from fastapi import FastAPI, Request

from app.errors import BadParameterError, NoTrafficError, TrafficLockedError
from app.graph.service import EnsembleService
from app.http.errors import CODED, ERRORS, described
from app.http.json_fields import read_fields
from app.responses import ErrorAnswer
from app.traffic.control import EXPECTED, TrafficControl
from app.traffic.status import TrafficStatus

PATH = "/v1/traffic"
MISSING: dict[int | str, dict[str, Any]] = {
    404: described(ErrorAnswer, "no traffic, or a version that is not loaded"),
    503: described(ErrorAnswer, "the deployment Traffic does not answer"),
}
CHANGING: dict[int | str, dict[str, Any]] = {
    **MISSING,
    403: described(ErrorAnswer, "no keys, and the settings do not allow it"),
    **CODED,
    **{status: ERRORS[status] for status in (408, 413)},
    409: described(ErrorAnswer, "revision is not the newest plan's"),
    422: described(ErrorAnswer, "shares that are no split, or a version refused"),
}
SPLIT = {
    "shares": {"type": "object", "additionalProperties": {"type": "number"}},
    "shadow": {"type": "string", "nullable": True},
    "rollback": {"type": "boolean"},
    "revision": {"type": "integer"},
}
BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": SPLIT},
            "example": {"shares": {"imagenet@1083e06ff666": 95, "imagenet@5b1de7a0f9c2": 5}},
        }
    },
}


def add_traffic(api: FastAPI, service: EnsembleService, traffic: TrafficControl | None) -> None:
    """Add the routes; ``traffic`` is None if the settings have no versions."""

    def control() -> TrafficControl:
        if traffic is None:
            raise NoTrafficError(
                "this service has one version of its set: name others in the settings traffic or "
                "shadow"
            )
        return traffic

    @api.get(
        PATH,
        response_model_exclude_none=True,
        responses=MISSING,
        summary="Versions of the set: shares, shadow, comparison",
    )
    async def seen() -> TrafficStatus:
        return await control().status()

    @api.put(
        PATH,
        response_model_exclude_none=True,
        responses=CHANGING,
        openapi_extra={"requestBody": BODY},
        summary="Change shares and shadow, or go back; answered once all Gateways serve it",
    )
    async def change(request: Request) -> TrafficStatus:
        asked = control()
        if not service.keys and not service.settings.open_traffic:
            raise TrafficLockedError(
                "this service has no keys, so whoever reaches it could change its traffic: set "
                "api_keys_file, or open_traffic: true"
            )
        timeout_s = service.settings.request_timeout_s
        return await asked.change(
            await read_fields(request, timeout_s, BadParameterError, EXPECTED)
        )
