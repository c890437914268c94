"""Who is let in: refusing at once, before a body is read, is kinder than a timeout later."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import OverloadedError
from app.pace import Pace
from app.readers import Readers

# Fewer than this are let in whatever the pace: they fill a batch or two, and a pace that was
# measured while something hung must not keep them out.
ALWAYS = 16
MAX_RETRY_AFTER_S = 30


class Admission:
    """Counts the requests under way, and refuses those that could not be answered in time."""

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_requests, self._on_refused = max_requests, on_refused
        self._pace = Pace(clock)
        self.readers = Readers()

    @property
    def num_under_way(self) -> int:
        """How many requests are under way."""
        return self._pace.num_there

    @contextmanager
    def admit(self, timeout_s: float = math.inf) -> Iterator[None]:
        """Count a request while it is under way, its body included; ``timeout_s`` is its time.

        Raises:
            OverloadedError: as many as the limit are under way and none of them is a slow upload,
                whose place could be taken, or those that are will take longer than ``timeout_s``.

        """
        try:
            self._check(timeout_s)
        except OverloadedError:
            self._on_refused()
            raise
        self._pace.came()
        try:
            yield
        except BaseException:
            self._pace.gave_up()
            raise
        self._pace.done()

    def _check(self, timeout_s: float) -> None:
        num = self.num_under_way
        wait_s = self._pace.wait_s(num)
        if num >= self._max_requests and not self.readers.cut_slowest():
            raise OverloadedError(*_refusal(f"{num} requests are under way, the limit", wait_s))
        if num >= ALWAYS and wait_s > timeout_s:
            told = f"{num} requests are under way and take {wait_s:.1f} s, more than the "
            raise OverloadedError(*_refusal(f"{told}{timeout_s:.3g} s of this one", wait_s))


def _refusal(reason: str, wait_s: float) -> tuple[str, int]:
    """Return the message, and after how many seconds half of what is under way will be done."""
    after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s / 2)))
    return f"{reason}; try again in {after_s} s", after_s
