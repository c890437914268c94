"""A clock that moves when the test says so."""


class HandClock:
    """Called as a clock is, or in the place of the module ``time``; in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = __call__
