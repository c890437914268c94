"""The deployment ``Sets``: which sets callers loaded and unloaded by name, for all Gateways.

It has one replica, and only where the settings have ``model_sets``. Requests do not pass it.
"""

import time
from collections.abc import Mapping

from app.deployments.replica import start_replica
from app.settings import Settings

Change = tuple[int, bool]  # its revision, and whether the set is to be served
IS_THERE_S = 5.0  # a Gateway that reported within it; they report every second


class Sets:
    """Knows the last change of each set; ``origin`` tells services of other settings apart."""

    def __init__(self, settings: Settings, origin: str) -> None:
        start_replica(settings)
        self._origin = origin
        self._changes: dict[str, Change] = {}
        self._reports: dict[str, tuple[float, int]] = {}  # by Gateway: when, and what it serves

    async def report(
        self, gateway: str, origin: str, changes: Mapping[str, Change], revision: int
    ) -> dict[str, Change] | None:
        """Note what a Gateway knows and serves; return the last changes, None to other services.

        Newer changes than known here are taken: this began anew, the Gateways did not.
        """
        if origin != self._origin:
            return None
        for name, change in changes.items():
            self._changes[name] = max(change, self._changes.get(name, change))
        self._reports[gateway] = time.monotonic(), revision
        return self._changes

    async def change(self, name: str, is_wanted: bool) -> int:
        """Have a set served by all Gateways, or by none; return the change's revision."""
        revision = 1 + max((revision for revision, _ in self._changes.values()), default=0)
        self._changes[name] = revision, is_wanted
        return revision

    async def revisions(self) -> list[int]:
        """Return the revision that each Gateway serves."""
        since = time.monotonic() - IS_THERE_S
        self._reports = {name: of for name, of in self._reports.items() if of[0] > since}
        return [revision for _, revision in self._reports.values()]
