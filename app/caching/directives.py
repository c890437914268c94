"""What a request's ``Cache-Control`` says of the response cache (RFC 9111, section 5.2.1)."""

from typing import Literal

CACHE_CONTROL = "cache-control"
# use: read and store; renew: store, do not read (no-cache); off: neither (no-store).
CacheUse = Literal["use", "renew", "off"]


def cache_use_of(cache_control: str | None) -> CacheUse:
    """Return what a client allows; directives that are not known say nothing."""
    if not cache_control:
        return "use"
    parts = cache_control.lower().split(",")
    directives = {part.partition("=")[0].strip() for part in parts}
    if "no-store" in directives:
        return "off"
    return "renew" if "no-cache" in directives else "use"
