"""Metrics of requests: count and latency by route and status."""

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


def record_answered(route: str, status: int, duration_ms: float) -> None:
    """Count a request of either interface; gRPC's too has the status that HTTP would have."""
    meter.defer(_record_answered, route, status, duration_ms)


def _record_answered(route: str, status: int, duration_ms: float) -> None:
    operation = "classify" if route in CLASSIFY else "other"
    meter.count(REQUESTS, route=route, status=str(status), operation=operation)
    if route in CLASSIFY:
        meter.observe(REQUEST_MS, duration_ms, status=str(status))
