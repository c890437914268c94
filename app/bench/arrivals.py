"""Arrival times of an open loop: a Poisson process, drawn before the load starts."""

import math

import numpy as np
import numpy.typing as npt

from app.errors import ConfigError

MAX_ARRIVALS = 2_000_000


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Return the times (in s from the start, rising) of independent arrivals at ``rate`` per s.

    Raises:
        ConfigError: rate or duration is no positive finite number, or there would be too many.

    """
    for name, value in (("rate", rate), ("duration", duration_s)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value}; it must be a number above 0")
    expected = rate * duration_s
    if expected > MAX_ARRIVALS:
        raise ConfigError(
            f"{rate:g} requests/s for {duration_s:g} s are {expected:.0f} requests; "
            f"{MAX_ARRIVALS} is the limit: a lower rate or a shorter time"
        )
    rng = np.random.default_rng(seed)
    num_drawn = math.ceil(expected + 6 * math.sqrt(expected) + 10)
    times = np.cumsum(rng.exponential(1 / rate, num_drawn))
    arrivals: npt.NDArray[np.float64] = times[times < duration_s]
    return arrivals
