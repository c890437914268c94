"""The deployment ``Traffic``: owns the plan of all Gateways, and sums up their figures.

It has one replica, and exists only if the settings name versions. Requests do not pass through it:
while it is down, Gateways keep their plan.
"""

from app.deployments.replica import start_replica
from app.settings import Settings
from app.traffic.book import BookStatus, TrafficBook
from app.traffic.comparison import Figures
from app.traffic.plan import Plan, Split


class Traffic:
    """:class:`app.traffic.book.TrafficBook` behind a handle."""

    def __init__(self, settings: Settings, plan: Plan) -> None:
        """Begin with the settings' plan; Gateways that have a newer plan report it."""
        start_replica(settings)
        self._book = TrafficBook(plan)

    async def report(self, gateway: str, plan: Plan, figures: Figures) -> Plan | None:
        """Record a Gateway's figures, and return the newest plan."""
        return self._book.report(gateway, plan, figures)

    async def change(self, split: Split | None, revision: int | None) -> int:
        """Make the next plan and return its revision; see :meth:`TrafficBook.change`."""
        return self._book.change(split, revision)

    async def status(self) -> BookStatus:
        """Return the plan and the figures of all Gateways."""
        return self._book.status()
