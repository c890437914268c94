"""The record of a service's traffic: the newest plan, and the last report of each Gateway."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from app.traffic.comparison import Figures
from app.traffic.plan import Plan, Split

IS_THERE_S = 5.0  # A Gateway serves if it reported within this time; it reports every second.
MAX_REPORTS = 1000  # Gateways whose figures are kept apart, so that they count once.


@dataclass(slots=True)
class _Report:
    revision: int
    figures: Figures
    at: float


class BookStatus(NamedTuple):
    """The plan, the revision that each live Gateway serves, and the sum of all figures."""

    plan: Plan
    gateways: list[int]
    figures: Figures


class TrafficBook:
    """Holds the plan and the Gateways' reports; ``clock`` returns seconds."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self._clock = plan, clock
        self._reports: dict[str, _Report] = {}  # by Gateway; the newest report is the last
        self._past = Figures()  # of Gateways that were silent for longer

    def report(self, gateway: str, plan: Plan, figures: Figures) -> Plan | None:
        """Record a Gateway's plan and figures, and return the newest plan.

        If the Gateway's plan is newer, the book adopts it: the book's replica was restarted, and
        the Gateways were not. A plan with another origin is of another service: returns None.
        """
        if plan.origin != self.plan.origin:
            return None
        if plan.order > self.plan.order:
            self.plan = plan
        self._reports.pop(gateway, None)
        self._reports[gateway] = _Report(plan.revision, figures, self._clock())
        if len(self._reports) > MAX_REPORTS:
            self._past.add(self._reports.pop(next(iter(self._reports))).figures)
        return self.plan

    def change(self, split: Split | None, revision: int | None) -> int:
        """Make the next plan and return its revision; ``split`` None rolls the last change back.

        Raises:
            PlanChangedError: ``revision`` is not the newest plan's.
            BadParameterError: there is no earlier split.

        """
        self.plan.check_seen(revision)
        new = self.plan.rolled_back() if split is None else self.plan.changed(split)
        self.plan = new
        return new.revision

    @property
    def gateways(self) -> list[int]:
        """The revision that each live Gateway serves."""
        now = self._clock()
        return [r.revision for r in self._reports.values() if now - r.at < IS_THERE_S]

    def status(self) -> BookStatus:
        total = Figures()
        reported = (report.figures for report in self._reports.values())
        for figures in (self._past, *reported):
            total.add(figures)
        return BookStatus(self.plan, self.gateways, total)
