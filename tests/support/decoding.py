"""What makes images for the members, as a test says."""

from collections.abc import Callable


class Decoding:
    """A source whose images a test counts."""

    def __init__(self, num_threads: int = 2) -> None:
        self.num_threads, self.num_coming = num_threads, 0
        self._ended: Callable[[], None] = lambda: None

    def tell(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def end(self, num: int = 1) -> None:
        self.num_coming -= num
        self._ended()
