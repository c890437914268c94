"""The time limit of an answer: less than HAProxy waits for a Gateway before it asks another one."""

import math

from app.environment import GATEWAY_TIMEOUT, gateway_timeout_s
from app.errors import ConfigError
from app.settings import Settings

OF_GATEWAY_TIMEOUT = 0.8


def answer_timeout_s(settings: Settings) -> float:
    """Return how long a Gateway of this node may take once it has the body.

    Raises:
        ConfigError: this node's HAProxy would give up a Gateway that may still answer.

    """
    given, haproxy_s = settings.answer_timeout_s, gateway_timeout_s()
    most_s = math.inf if haproxy_s is None else OF_GATEWAY_TIMEOUT * haproxy_s
    if given is not None and given > most_s:
        raise ConfigError(
            f"answer_timeout_s is {given:g}, and after {haproxy_s:g} s without an answer HAProxy "
            f"asks another Gateway ({GATEWAY_TIMEOUT}, from tandem environment): set it to "
            f"{most_s:g} at most, or leave it out"
        )
    return min(given or most_s, settings.request_timeout_s)
