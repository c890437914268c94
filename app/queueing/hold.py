"""A wait of bounded length, of what would be larger if it left a little later."""

import asyncio
from collections.abc import Callable


class Hold:
    """Begun when something begins to wait, ended when it leaves; ``over`` is called if it must.

    Once it was over nothing waits again until what waited has left.
    """

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._timer: asyncio.TimerHandle | None = None
        self.was_whole = False  # what waits has waited as long as it may

    @property
    def is_on(self) -> bool:
        """Whether something waits, and may."""
        return self._timer is not None

    def begin(self, max_s: float) -> None:
        """Let wait for ``max_s`` at most; one that is on goes on."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max_s, self._is_over)

    def end(self) -> None:
        """Note that what waited has left, or is gone."""
        self.was_whole = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_over(self) -> None:
        self._timer, self.was_whole = None, True
        self._over()
