"""OpenTelemetry's variables: removes unusable ones; without a collector tracing is off.

OpenTelemetry raises when it reads an unusable variable, at import, in every process of Ray's, even
without tracing. A tracing error must not keep the service from starting.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

from app.environment import environment_value, otlp_endpoint, remove_from_environment
from app.launch.config import ServeConfig

Reason = str | None  # why a value cannot be used
COMPRESSIONS = ("gzip", "deflate", "none")
PROTOCOLS = ("grpc", "http/protobuf")


def leave_out_unusable() -> list[str]:
    """Remove variables with unusable values from the environment; return a line for each.

    Empty variables are removed without a line: they count as not set, but OpenTelemetry would
    raise.
    """
    lines = []
    for name, check in CHECKS.items():
        value = environment_value(name)
        reason = None if value is None else check(value)
        if value is None or reason is not None:
            remove_from_environment(name)
        if reason is not None:
            lines.append(f"{name}={value} is left out: {reason}")
    return lines


def without_unsent_traces(config: ServeConfig) -> ServeConfig:
    """Switch tracing off if the settings send spans nowhere: Serve would make and drop them."""
    settings = config.settings
    is_sent = {
        "otlp": bool(settings.trace_endpoint or otlp_endpoint()),
        "jaeger": True,
        "none": False,
    }[settings.trace_exporter]
    return config if is_sent or not config.has_own_tracing else config.without_tracing()


def _propagators(value: str) -> Reason:
    names = {name.strip() for name in value.split(",")}
    reasons = (_installed("propagator", name) for name in sorted(names - {"none"}))
    return next(filter(None, reasons), None)


def _installed(kind: str, name: str) -> Reason:
    known = entry_points(group=f"opentelemetry_{kind}").names
    if name in known:
        return None
    return f"no {kind} {name!r} is installed, but {', '.join(sorted(known))}"


def _limit(value: str) -> Reason:
    is_number = value.isascii() and value.strip().isdigit()
    return None if is_number else "a whole number is wanted"


def _seconds(value: str) -> Reason:
    try:
        float(value)
    except ValueError:
        return "a number of seconds is wanted, without a unit"
    return None


def _either(value: str, known: tuple[str, ...]) -> Reason:
    return None if value.strip().lower() in known else f"{' or '.join(known)} is wanted"


CHECKS: dict[str, Callable[[str], Reason]] = {
    "OTEL_PROPAGATORS": _propagators,
    "OTEL_PYTHON_CONTEXT": partial(_installed, "context"),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": _limit,
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": _limit,
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": _limit,
    "OTEL_SPAN_EVENT_COUNT_LIMIT": _limit,
    "OTEL_SPAN_LINK_COUNT_LIMIT": _limit,
    "OTEL_EXPORTER_OTLP_TIMEOUT": _seconds,
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": _seconds,
    "OTEL_EXPORTER_OTLP_COMPRESSION": partial(_either, known=COMPRESSIONS),
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": partial(_either, known=COMPRESSIONS),
    "OTEL_EXPORTER_OTLP_PROTOCOL": partial(_either, known=PROTOCOLS),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": partial(_either, known=PROTOCOLS),
}
