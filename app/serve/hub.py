"""The deployments ``Feedback``, ``Traffic`` and ``Sets``: a book each, which all Gateways share.

Each has one replica, and only where the settings need it. Requests do not pass through it: while it
is down, Gateways serve as before.
"""

from typing import Any

from app.serve.replica import start_replica
from app.settings import Settings


class Hub:
    """Serve's hooks around a book; a new replica starts with ``book`` as it was bound."""

    def __init__(self, settings: Settings, book: object) -> None:
        start_replica(settings)
        self._book = book

    async def ask(self, method: str, *arguments: object) -> Any:
        """Return the answer of a method of the book."""
        return getattr(self._book, method)(*arguments)
