"""What makes images for the members, as a test says."""

from collections.abc import Callable


class Decoding:
    def __init__(self, num_threads: int = 2) -> None:
        self._num_threads, self.num_coming = num_threads, 0
        self._ended: Callable[[], None] = lambda: None

    @property
    def num_busy(self) -> int:
        return min(self.num_coming, self._num_threads)

    def on_decoded(self, call: Callable[[], None]) -> None:
        self._ended = call

    def end(self, num: int = 1) -> None:
        self.num_coming -= num
        self._ended()
