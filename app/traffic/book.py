"""The record of a service's traffic: the newest plan, and the last report of each Gateway."""

import time
from collections.abc import Callable
from typing import NamedTuple

from app.calls.hub_link import Book
from app.traffic.comparison import Figures
from app.traffic.plan import Plan, Split


class BookStatus(NamedTuple):
    """The plan, the revision that each live Gateway serves, and the sum of all figures."""

    plan: Plan
    gateways: list[int]
    figures: Figures


class TrafficBook(Book[Plan, Figures]):
    """Holds the plan and the Gateways' figures; Gateways that have a newer plan report it."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(plan, clock)
        self._past = Figures()  # of Gateways that were silent for longer

    def change(self, split: Split | None, revision: int | None) -> int:
        """Make the next plan and return its revision; ``split`` None rolls the last change back.

        Raises:
            PlanChangedError: ``revision`` is not the newest plan's.
            BadParameterError: there is no earlier split.

        """
        self.facts.check_seen(revision)
        self.facts = self.facts.rolled_back() if split is None else self.facts.changed(split)
        return self.facts.revision

    def status(self) -> BookStatus:
        """Return the plan and the figures of all Gateways; each Gateway's count once."""
        total = Figures()
        for figures in (self._past, *(of for *_, of in self._reports.values())):
            total.add(figures)
        return BookStatus(self.facts, self.revisions(), total)

    def _forget(self, more: Figures) -> None:
        self._past.add(more)
