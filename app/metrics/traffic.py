"""Metrics of the traffic between versions of a set."""

from collections.abc import Mapping

from app.metrics.meter import meter
from app.metrics.table import TRAFFIC_COMPARED, TRAFFIC_COPIES, TRAFFIC_SHARE, TRAFFIC_VARIATION


def record_shares(shares: Mapping[str, float]) -> None:
    """Record the percent of requests that each version answers, by NAME@FINGERPRINT."""
    for name, share in shares.items():
        meter.set(TRAFFIC_SHARE, share, model_version=_version_of(name))


def record_copies(name: str, result: str, number: int) -> None:
    """Count copies of photos for a version: computed, dropped or failed."""
    meter.count(TRAFFIC_COPIES, number, model_version=_version_of(name), result=result)


def record_comparison(name: str, variation: float, *, has_agreed: bool) -> None:
    """Count a photo that a version and the main one both answered."""
    version = _version_of(name)
    meter.count(TRAFFIC_COMPARED, model_version=version, agreed="yes" if has_agreed else "no")
    meter.count(TRAFFIC_VARIATION, variation, model_version=version)


def _version_of(name: str) -> str:
    return name.rpartition("@")[2]
