"""Limits the bytes of request bodies that one Gateway holds at a time."""

from typing import Self

from app.errors import OverloadedError


class ByteBudget:
    """Counts what has arrived of every body, until its request is answered.

    What a request only announces is compared with the budget and not reserved: twelve clients that
    announce 20 MB and send nothing would otherwise have all of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_held = limit, 0

    def share(self) -> "Share":
        """Return the account of one request; what it holds is given back when its block ends."""
        return Share(self)


class Share:
    """What one request holds of a :class:`ByteBudget`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self.num_held = budget, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.num_held -= self.num_held

    def expect(self, num_bytes: int) -> None:
        """Raise :class:`OverloadedError` if so many more bytes have no room now."""
        budget = self._budget
        if budget.num_held + num_bytes > budget.limit:
            raise OverloadedError(
                f"the bodies under way hold {budget.num_held} bytes, the limit of all together is "
                f"{budget.limit}; try again in 1 s"
            )

    def grow(self, num_bytes: int) -> None:
        """Hold so many more bytes, which have arrived; raises as :meth:`expect` does."""
        self.expect(num_bytes)
        self._budget.num_held += num_bytes
        self.num_held += num_bytes
