"""Metrics of the response cache: what was found, what it holds, what had to go."""

from collections.abc import Mapping

from app.metrics.meter import meter
from app.metrics.table import CACHE_BYTES, CACHE_EVICTIONS, CACHE_LOOKUPS, CACHE_REDIS


def record_lookups(found: Mapping[str, int]) -> None:
    """Count a request's images by what the cache had of them."""
    for result, number in found.items():
        meter.count(CACHE_LOOKUPS, number, result=result)


def record_redis(result: str, number: int) -> None:
    """Count images by what came of looking for them in Redis, or of writing them there."""
    meter.count(CACHE_REDIS, number, result=result)


def record_state(num_bytes: int, num_evicted: int) -> None:
    """Tell what a cache holds, and how many images it has evicted since it was last asked."""
    meter.set(CACHE_BYTES, num_bytes)
    meter.count(CACHE_EVICTIONS, num_evicted)
