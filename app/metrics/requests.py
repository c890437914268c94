"""Metrics of requests: count and latency by route and status."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics.meter import meter
from app.metrics.table import REQUEST_MS, REQUESTS

INFER = "/v2/models/{model_name}/infer"
INFER_VERSION = "/v2/models/{model_name}/versions/{model_version}/infer"
# The routes that classify images, HTTP's and gRPC's: their latency is measured, and alerts and
# dashboard ask for them all by the tag ``operation``.
CLASSIFY = frozenset(
    {
        "/v1/classify",
        "/tandem.v1.Ensemble/Classify",
        INFER,
        INFER_VERSION,
        "/inference.GRPCInferenceService/ModelInfer",
    }
)
CLIENT_WENT = 499  # nginx's number for it; nobody gets this answer


class MeasuredRequests:
    """ASGI middleware around the interface."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not meter.is_on:
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500  # what an exception becomes, further out

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            status = CLIENT_WENT
            raise
        finally:
            record_request(scope, status, (time.perf_counter() - started) * 1e3)


def record_request(scope: Scope, status: int, duration_ms: float) -> None:
    """Count a request; paths that are no route are one, however many a scanner tries."""
    record_answered(getattr(scope.get("route"), "path", "other"), status, duration_ms)


def record_answered(route: str, status: int, duration_ms: float) -> None:
    """Count a request of either interface; gRPC's too has the status that HTTP would have."""
    meter.defer(_record_answered, route, status, duration_ms)


def _record_answered(route: str, status: int, duration_ms: float) -> None:
    operation = "classify" if route in CLASSIFY else "other"
    meter.count(REQUESTS, route=route, status=str(status), operation=operation)
    if route in CLASSIFY:
        meter.observe(REQUEST_MS, duration_ms, status=str(status))
