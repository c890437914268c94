"""Writes the measured values into a configuration."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.settings import Settings
from app.tune.pareto import Point

DEFAULT_ONGOING = 5  # Serve's own max_ongoing_requests
FEWEST = 2  # requests at a time: 1 would refuse the browser that shows the service's page
STAGES = ("decoder", "members", "combiner")
HEADER = """\
Written by tandem tune, {measured}: {cpu}, {cores} cores.
{command}
Measured with {model_set}: {candidate}.
{clients} clients got {throughput:.1f} images/s, p50 {p50:.0f} ms, p99 {p99:.0f} ms, the medians of
{runs} runs inside the processes: HTTP and Ray are not in it, they add a few ms and percent (tandem
bench against the running service measures all).
Changed: args.streams, args.batch_sizes, args.backlog_batches, args.max_concurrent_requests; the
Gateway's num_replicas, and args.affinity and num_cpus, the cores of each, where there are several
of them (less than one CPU is a share for placement: then a replica uses all cores).
{limit}"""
KEPT = """\
max_concurrent_requests, {most} for each Gateway: the most that were measured within a p99 of
{p99_ms:g} ms. More get 429 at once."""
OPEN = """\
max_concurrent_requests, {most} for each Gateway: no p99 was asked for, so it is as it was, and at
least twice the measured clients."""


def check_place(settings: Settings, path: Path) -> None:
    """Raise :class:`ConfigError` unless every stage is in the Gateway's process, as measured."""
    apart = [name for name in STAGES if getattr(settings, name) == "deployment"]
    if apart:
        raise ConfigError(
            f"{path}: {', '.join(apart)} in deployments of their own; tune measures them in the "
            "Gateway's process: set them to gateway, or give another --config"
        )


def request_limit(
    point: Point, points: Sequence[Point], p99_ms: float | None, configured: int
) -> int:
    """Return ``max_concurrent_requests`` of a Gateway.

    At full load the wait grows with the requests under way. With a required p99 the limit is the
    most clients that kept it, with the same candidate. Without one it is the configured value, but
    at least twice the measured clients.
    """
    replicas = point.candidate.layout.replicas
    if p99_ms is None:
        return max(configured, 2 * math.ceil(point.clients / replicas))
    in_time = [p.clients for p in (point, *points)
               if p.candidate == point.candidate and p.p99_ms <= p99_ms]  # fmt: skip
    return max(FEWEST, max(in_time) // replicas)


def tuned(
    config: ServeConfig, point: Point, points: Sequence[Point], p99_ms: float | None
) -> ServeConfig:
    """Return the configuration with the point's replicas, streams, batch sizes and limit.

    ``points`` are all measured points, including ``point``.
    """
    before, candidate = config.settings, point.candidate
    limit = request_limit(point, points, p99_ms, before.max_concurrent_requests)
    arguments: dict[str, Any] = {
        "streams": candidate.layout.streams,
        "batch_sizes": list(candidate.batch_sizes),
        "backlog_batches": False,  # as measured
        "max_concurrent_requests": limit,
    }
    if candidate.layout.replicas > 1:
        arguments["affinity"] = True  # as measured: each on its own cores
    if before.max_queued_images < limit:
        arguments["max_queued_images"] = limit
    gateway = _tuned_gateway(config.deployment("Gateway"), point, limit)
    return config.with_arguments(**arguments).with_deployment(gateway)


def _tuned_gateway(gateway: dict[str, Any], point: Point, limit: int) -> dict[str, Any]:
    layout = point.candidate.layout
    for option in ("autoscaling_config", "max_replicas_per_node"):  # now a fixed number
        gateway.pop(option, None)
    gateway["num_replicas"] = layout.replicas
    # So that the Gateway's own answer, 429 in JSON, comes before Serve's.
    if gateway.get("max_ongoing_requests", DEFAULT_ONGOING) <= limit:
        gateway["max_ongoing_requests"] = 2 * limit
    actor = gateway.setdefault("ray_actor_options", {})
    share = actor.get("num_cpus")  # None: Serve's default, 1
    if layout.replicas > 1 or share is None or share >= 1:
        actor["num_cpus"] = layout.cores
    return gateway


def as_yaml(
    config: ServeConfig, point: Point, machine: dict[str, Any], p99_ms: float | None
) -> str:
    """Return the file's text: the origin of the numbers, then the configuration."""
    most = config.settings.max_concurrent_requests
    limit = OPEN if p99_ms is None else KEPT
    header = HEADER.format(
        measured=machine["measured"],
        cpu=machine["cpu"],
        cores=machine["cores"],
        command=" ".join(machine["command"].split()),  # a single line, within the comment
        model_set=config.settings.model_set,
        candidate=point.candidate,
        clients=point.clients,
        throughput=point.throughput,
        p50=point.p50_ms,
        p99=point.p99_ms,
        runs=point.num_runs,
        limit=limit.format(most=most, p99_ms=p99_ms),
    )
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + yaml.safe_dump(
        config.as_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
