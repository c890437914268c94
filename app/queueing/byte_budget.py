"""Limits the bytes of request bodies that one Gateway holds at a time."""

from typing import Self

from app.errors import OverloadedError


class ByteBudget:
    """Counts the bytes of every body that have arrived, until its request is answered.

    Announced bytes (Content-Length) are checked against the budget but not reserved. Otherwise
    twelve clients that announce 20 MB each and send nothing would use up 256 MiB.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_held = limit, 0

    def share(self) -> "Share":
        """Return a request's share, a context manager that frees its bytes at the block's end."""
        return Share(self)


class Share:
    """The bytes of a :class:`ByteBudget` that one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self.num_held = budget, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Give the bytes back; from then on the share holds none."""
        self._budget.num_held -= self.num_held
        self.num_held = 0

    def expect(self, num_bytes: int) -> None:
        """Raise :class:`OverloadedError` if ``num_bytes`` more would not fit now."""
        budget = self._budget
        if budget.num_held + num_bytes > budget.limit:
            raise OverloadedError(
                f"the bodies of all requests hold {budget.num_held} bytes, of at most "
                f"{budget.limit} (max_bytes_in_flight); try again in 1 s"
            )

    def grow(self, num_bytes: int) -> None:
        """Add bytes that have arrived; raises as :meth:`expect` does."""
        budget = self._budget
        if budget.num_held + num_bytes > budget.limit:
            self.expect(num_bytes)  # raises
        budget.num_held += num_bytes
        self.num_held += num_bytes
