"""The names that Prometheus sees of a metric."""

from app.telemetry.metric_table import Metric


def exposed(metric: Metric) -> tuple[str, ...]:
    total = "_total" if metric.kind == "counter" else ""
    return tuple(f"ray_{part.name}{total}" for part in metric.parts)
