"""Reads and changes the traffic: the methods behind ``/v1/traffic``, and the link to its owner.

The deployment ``Traffic`` owns the plan of all Gateways. A Gateway sends it figures and receives
the newest plan.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from app.calls.hub_link import HubLink
from app.errors import BadParameterError, PlanChangedError
from app.traffic.book import BookStatus
from app.traffic.graph import TrafficGraph
from app.traffic.plan import Plan, Split
from app.traffic.status import TrafficStatus, status_of

logger = logging.getLogger("ray.serve")
EXPECTED = '{"shares": {"NAME@VERSION": 95, ...}, "shadow": null} or {"rollback": true}'
EVERYWHERE_S = 5.0  # how long a change waits for the other Gateways
AGAIN_AFTER_S = 30.0  # the pause before a version that could not be loaded is tried again


class TrafficControl(HubLink):
    """The traffic of all Gateways, as one Gateway reads and changes it.

    Args:
        handle: of the deployment that owns the plan; it gets a report every second.
        graph: this Gateway's.
        refused: each loaded version with the reason why it must not answer, or None.
        load: loads a version by name. With True, for a version that is to answer clients, it
            refuses a version that lost too much accuracy.

    """

    def __init__(
        self,
        handle: Any,
        graph: TrafficGraph,
        refused: Mapping[str, str | None],
        load: Callable[[str, bool], Awaitable[None]],
    ) -> None:
        super().__init__(handle, "Traffic")
        self._graph, self._refused, self._load = graph, refused, load

    async def status(self) -> TrafficStatus:
        """Return the plan and the figures of all Gateways.

        Raises:
            NotReadyError: the deployment Traffic does not answer.

        """
        return status_of(await self._book(), self._refused)

    async def change(self, content: dict[str, Any]) -> TrafficStatus:
        """Make a request's change, wait for all Gateways, and return :meth:`status`.

        Raises:
            BadParameterError: the request is malformed, or a version must not answer clients.
            UnknownModelError: no version has a name that the request gives.
            TandemError: a version cannot be loaded.
            PlanChangedError: the request was made from a plan that is no longer the newest; or
                another plan replaced this one meanwhile.
            NotReadyError: the deployment Traffic does not answer.

        """
        if content.keys() - {"shares", "shadow", "rollback", "revision"}:
            raise BadParameterError(f"send {EXPECTED}; the revision that you saw is optional")
        revision, is_rollback = content.get("revision"), content.get("rollback", False)
        if revision is not None and (isinstance(revision, bool) or not isinstance(revision, int)):
            raise BadParameterError("revision is not an integer: send that of GET /v1/traffic")
        if is_rollback is True and not content.keys() & {"shares", "shadow"}:
            await self._change(None, revision)
        elif is_rollback is False:
            split = Split.of(content)
            if revision is not None:  # checked first: building versions takes seconds
                (await self._book()).plan.check_seen(revision)
            # The loaded ones first: a refused one of them is known before others are built.
            for name in sorted(split.versions, key=lambda name: name not in self._refused):
                await self._load(name, name in split.answering)
            await self._change(split, revision)
        else:
            raise BadParameterError(f"rollback must be true, without shares: send {EXPECTED}")
        return await self.status()

    async def _change(self, split: Split | None, revision: int | None) -> None:
        """Change the plan and wait for all Gateways; ``split`` None rolls the last change back."""
        await self._exchange()  # a restarted book learns the newest plan from this report
        new = await self.call("change", split, revision)
        await self._everywhere(new, EVERYWHERE_S)
        plan = (await self.call("status")).plan
        if plan.revision != new and (split is None or plan.split != split):
            raise PlanChangedError(
                f"revision {plan.revision} replaced this change, revision {new}: look at the "
                "traffic again (tandem traffic), then change it"
            )

    async def _book(self) -> BookStatus:
        """Return :meth:`app.traffic.book.TrafficBook.status`, with this Gateway's latest figures.

        Raises:
            NotReadyError: the deployment does not answer.

        """
        await self._exchange()
        status: BookStatus = await self.call("status")
        return status

    async def _exchange(self) -> None:
        newest = await self._report()
        if newest is not None and newest.order > self._graph.plan.order and self._has_all(newest):
            self._graph.take(newest)
            # Reported at once: whoever changed the plan waits for all Gateways to have it.
            await self._report()

    async def _report(self) -> Plan | None:
        """Report; return the newest plan, or None if the deployment belongs to a newer service."""
        # A copy, since Serve serialises it later on another thread.
        figures = deepcopy(self._graph.figures)
        newest: Plan | None = await self.call("report", self._gateway, self._graph.plan, figures)
        return newest

    def _has_all(self, plan: Plan) -> bool:
        """Whether all versions of a plan are loaded; if not, begin to load them."""
        missing = [name for name in plan.split.versions if name not in self._graph.versions]
        if missing:
            self._load_soon(partial(self._load_all, missing))
        return not missing

    async def _load_all(self, names: list[str]) -> None:
        for name in names:
            try:
                await self._load(name, False)
            except Exception:
                logger.exception("%s cannot be loaded; this Gateway keeps its present plan", name)
                await asyncio.sleep(AGAIN_AFTER_S)
