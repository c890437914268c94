"""Metrics of requests, of their answers, and of look-ups in the response cache."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from app.metrics.meter import Tags, meter
from app.metrics.table import (
    ANSWERS,
    CACHE_BYTES,
    CACHE_EVICTIONS,
    CACHE_LOOKUPS,
    CACHE_REDIS,
    ENTROPY,
    REQUEST_MS,
    REQUESTS,
    SKIPPED,
    STAGE_MS,
)
from app.responses import Classified

INFER = "/v2/models/{model_name}/infer"
INFER_VERSION = "/v2/models/{model_name}/versions/{model_version}/infer"
PREDICT = "/v1/models/{model_name}:predict"
PREDICT_VERSION = "/v1/models/{model_name}/versions/{model_version}:predict"
# The routes that classify images, over HTTP and gRPC. Their latency is measured; alerts and
# dashboard select them by the tag ``operation``.
CLASSIFY = frozenset(
    {
        "/v1/classify",
        "/tandem.v1.Ensemble/Classify",
        INFER,
        INFER_VERSION,
        PREDICT,
        PREDICT_VERSION,
        "/inference.GRPCInferenceService/ModelInfer",
    }
)
SURE = {True: "yes", False: "no", None: "unknown"}
CLIENT_WENT = 499  # nginx's status for a client that hung up; it is never sent
StageDuration = tuple[Tags, float]  # the tags of a stage (stage_tags), and ms


def record_answered(route: str, status: int, duration_ms: float) -> None:
    """Count a request over HTTP or gRPC; gRPC requests get the corresponding HTTP status."""
    operation = "classify" if route in CLASSIFY else "other"
    meter.count(REQUESTS, route=route, status=str(status), operation=operation)
    if route in CLASSIFY:
        meter.observe(REQUEST_MS, duration_ms, status=str(status))


def record_answers(
    answers: Sequence[Classified], entropy: float, durations: Iterable[StageDuration]
) -> None:
    """Record the images of a request; ``entropy`` is the sum over its images, 0..1 each."""
    meter.observe_all(STAGE_MS, durations)
    for answer in answers:
        agreed = "yes" if answer.agreement else "no"
        agreed = "alone" if len(answer.members) == 1 else agreed
        degraded, sure = "yes" if answer.degraded else "no", SURE[answer.sure]
        version = answer.model_version
        meter.count(ANSWERS, agreed=agreed, degraded=degraded, sure=sure, model_version=version)
        for member in answer.skipped_members or ():
            meter.count(SKIPPED, member=member)
    meter.count(ENTROPY, by=entropy)


def record_stage(tags: Tags, duration_ms: float) -> None:
    """Record the duration of a stage of a request or of an image."""
    meter.observe_all(STAGE_MS, [(tags, duration_ms)])


@cache
def stage_tags(stage: str, member: str | None) -> Tags:
    """Return the tags of a stage, and of its member if it has one."""
    return ("stage", stage), ("member", member or "none")


def record_lookups(images: Mapping[str, int]) -> None:
    """Count a request's images by the result of the look-up."""
    for result, number in images.items():
        meter.count(CACHE_LOOKUPS, number, result=result)


def record_redis(result: str, number: int) -> None:
    """Count images by the result of reading them from Redis or writing them there."""
    meter.count(CACHE_REDIS, number, result=result)


def record_state(num_bytes: int, num_evicted: int) -> None:
    """Record a cache's size, and the images that it evicted since the last call."""
    meter.set(CACHE_BYTES, num_bytes)
    meter.count(CACHE_EVICTIONS, num_evicted)
