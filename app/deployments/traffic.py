"""The deployment ``Traffic``: owns the plan of all Gateways, and sums up their figures.

It has one replica, and exists only if the settings name versions. Requests do not pass through it:
while it is down, Gateways keep their plan.
"""

from collections.abc import Mapping
from typing import Any

from app.compute.serve_log import write_to_stderr_as_to_files
from app.traffic.book import TrafficBook
from app.traffic.plan import Plan


class Traffic:
    """:class:`app.traffic.book.TrafficBook` behind a handle; arguments are plain values."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """Begin with the settings' plan; Gateways that have a newer plan report it."""
        write_to_stderr_as_to_files()
        self._book = TrafficBook(Plan.of(plan))

    async def report(
        self, gateway: str, plan: Mapping[str, Any], figures: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Record a Gateway's figures, and return the newest plan."""
        return self._book.report(gateway, plan, figures)

    async def change(self, split: Mapping[str, Any] | None, revision: int | None) -> int:
        """Make the next plan and return its revision; see :meth:`TrafficBook.change`."""
        return self._book.change(split, revision)

    async def status(self) -> dict[str, Any]:
        """Return the plan and the figures of all Gateways."""
        return self._book.status()
