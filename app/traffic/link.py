"""Links a Gateway with the deployment ``Traffic``: sends figures and receives the newest plan."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from app.calls.hub_link import EXCHANGE_EVERY_S, HubLink
from app.errors import PlanChangedError
from app.traffic.graph import TrafficGraph
from app.traffic.plan import Plan, Split

logger = logging.getLogger("ray.serve")
Load = Callable[[str], Awaitable[None]]
EVERYWHERE_S = 5.0  # how long a change waits for the other Gateways
AGAIN_AFTER_S = 30.0  # the pause before a version that could not be loaded is tried again


class TrafficLink(HubLink):
    """Reports every second to the deployment behind ``handle``; ``graph`` is this Gateway's."""

    def __init__(self, handle: Any, graph: TrafficGraph, load: Load) -> None:
        """``load`` loads a version that a plan names and that this Gateway lacks."""
        super().__init__(handle, "Traffic")
        self._graph, self._load = graph, load

    async def status(self) -> Mapping[str, Any]:
        """Return :meth:`app.traffic.book.TrafficBook.status`, with this Gateway's latest figures.

        Raises:
            NotReadyError: the deployment does not answer.

        """
        await self._exchange()
        status: Mapping[str, Any] = await self._call("status")
        return status

    async def change(self, split: Mapping[str, Any] | None, revision: int | None) -> None:
        """Change the plan and wait for all Gateways; ``split`` None rolls the last change back.

        Raises:
            NotReadyError: the deployment does not answer.
            PlanChangedError, BadParameterError: as :meth:`app.traffic.book.TrafficBook.change`;
                or another plan replaced this one meanwhile.

        """
        await self._exchange()  # a restarted book learns the newest plan from this report
        new = await self._call("change", split, revision)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERYWHERE_S):
                while min((await self.status())["gateways"], default=new) < new:
                    await asyncio.sleep(EXCHANGE_EVERY_S / 4)
        plan = Plan.of((await self._call("status"))["plan"])
        if plan.revision != new and (split is None or plan.split != Split.of(split)):
            raise PlanChangedError(
                f"revision {plan.revision} replaced this change, revision {new}: look at the "
                "traffic again (tandem traffic), then change it"
            )

    async def _exchange(self) -> None:
        graph = self._graph
        facts = graph.plan.as_dict(), graph.figures.as_dict()
        if (newest := await self._call("report", self._gateway, *facts)) is None:
            return  # the deployment belongs to a newer service
        plan = Plan.of(newest)
        if plan.order > graph.plan.order and self._has_all(plan):
            graph.take(plan)
            # Reported at once: whoever changed the plan waits for all Gateways to have it.
            await self._call("report", self._gateway, plan.as_dict(), graph.figures.as_dict())

    def _has_all(self, plan: Plan) -> bool:
        """Whether all versions of a plan are loaded; if not, begin to load them."""
        missing = [name for name in plan.split.versions if name not in self._graph.versions]
        if missing and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._load_all(missing))
        return not missing

    async def _load_all(self, names: list[str]) -> None:
        for name in names:
            try:
                await self._load(name)
            except Exception:
                logger.exception("%s cannot be loaded; this Gateway keeps its present plan", name)
                await asyncio.sleep(AGAIN_AFTER_S)
