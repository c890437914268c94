"""Where an exporter sends traces: the setting ``trace_endpoint``."""

from urllib.parse import urlsplit

# The schemes that an exporter takes, and examples.
TRACE_ENDPOINTS = {
    "otlp": (("http", "https"), "http://HOST:4317 (gRPC) or http://HOST:4318"),
    "jaeger": (("udp", "http", "https"), "udp://HOST:6831 or http://HOST:14268"),
}


def check_trace_endpoint(exporter: str, endpoint: str | None) -> None:
    """Raise ValueError if it is none; exporters that send nowhere take no notice of it."""
    if endpoint is None or exporter not in TRACE_ENDPOINTS:
        return
    schemes, example = TRACE_ENDPOINTS[exporter]
    try:
        parts = urlsplit(endpoint)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        is_one = False
    if not is_one:
        raise ValueError(f"trace_endpoint is {endpoint[:80]!r}; {exporter} takes {example}")
