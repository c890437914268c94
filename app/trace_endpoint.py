"""Checks that ``trace_endpoint`` is an address that its exporter takes."""

from urllib.parse import urlsplit

TAKEN = {
    "otlp": (("http", "https"), "http://HOST:4317 (gRPC) or http://HOST:4318"),
    "jaeger": (("udp", "http", "https"), "udp://HOST:6831 or http://HOST:14268"),
}


def check_endpoint(exporter: str, endpoint: str | None) -> None:
    """Raise ValueError if it is none; exporters that send nowhere take no notice of it."""
    if endpoint is None or exporter not in TAKEN:
        return
    schemes, example = TAKEN[exporter]
    try:
        parts = urlsplit(endpoint)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        is_one = False
    if not is_one:
        raise ValueError(f"trace_endpoint is {endpoint[:80]!r}; {exporter} takes {example}")
