"""A graph whose networks are unloaded when idle, and loaded again for the next request."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from app.errors import IN_A_SECOND, NotReadyError, UnknownModelError
from app.graph.request import ClassifyRequest, RequestAnswers
from app.graph.rolling_update import Graph
from app.telemetry.spans import untraced_task
from models.errors import TandemError

# The share of a request's time that it may wait for the load; the rest is for its answer.
WAIT_SHARE = 0.9
FAILED_FOR_S = 10.0  # how long a failed load is not tried again, and requests get its error
logger = logging.getLogger("ray.serve")


class OnDemandGraph:
    """The graph of one set, which may be unloaded; for one event loop.

    Args:
        name: the set's name.
        graph: the graph that is loaded now.
        load: builds the graph again, which takes seconds; may raise anything.
        unload: frees a graph that gets no more requests.
        unload_after_s: how long the set must be idle before :meth:`unload_idle` unloads it; None:
            never.
        clock: returns seconds.

    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        load: Callable[[], Awaitable[Graph]],
        unload: Callable[[Graph], Awaitable[None]],
        unload_after_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._clock = name, clock
        self._graph: Graph | None = graph
        self._load_graph, self._unload_graph = load, unload
        self._unload_after_s = unload_after_s
        self._num_running = 0
        self._asked_at = clock()
        self._loading: asyncio.Task[None] | None = None
        self._unloading: asyncio.Future[None] | None = None
        # As text: an exception that is raised again would keep all its requests in memory.
        self._problem: str | None = None
        self._failed_at = 0.0
        self._is_closed = False

    @property
    def is_loaded(self) -> bool:
        return self._graph is not None

    @property
    def problem(self) -> NotReadyError | None:
        """The error of a load that failed in the last ``FAILED_FOR_S``; None without one."""
        is_old = self._clock() - self._failed_at >= FAILED_FOR_S
        return None if is_old or self._problem is None else NotReadyError(self._problem)

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request, after loading the graph if needed; see :meth:`Ensemble.run`.

        Raises:
            NotReadyError: loading failed, or takes longer than the request's time.
            UnknownModelError: the set has been unloaded for good.

        """
        self._num_running += 1
        try:
            graph = self._graph or await self._loaded_for(request)
            return await graph.run(request)
        finally:
            self._num_running -= 1
            if not request.is_probe:
                self._asked_at = self._clock()

    async def load(self) -> None:
        """Return when the graph is loaded; concurrent calls share one load.

        Raises:
            NotReadyError: the load failed; the service's log says why.
            UnknownModelError: the set has been unloaded for good.

        """
        if self._graph is None and not self._is_closed:
            if self._loading is None:
                self._loading = untraced_task(self._load())
            await asyncio.shield(self._loading)
        if self._is_closed:
            raise UnknownModelError(f"the model set {self._name!r} was unloaded")
        if self._problem is not None:
            raise NotReadyError(self._problem)

    async def close(self) -> None:
        """Unload the graph for good, once it gets no more requests."""
        self._is_closed = True
        if self._loading is not None:
            await asyncio.wait([self._loading])
        if (graph := self._graph) is not None:
            self._graph = None
            await self._unload_graph(graph)

    def unload_idle(self) -> None:
        """Begin to unload the graph if it has been idle for ``unload_after_s``."""
        if self._unload_after_s is None or self._num_running or self._graph is None:
            return
        if (idle_s := self._clock() - self._asked_at) < self._unload_after_s:
            return
        logger.info("model set %s: unloaded after %.0f s without a request", self._name, idle_s)
        graph, self._graph = self._graph, None  # at once, so that the next request loads it again
        self._unloading = asyncio.ensure_future(self._unload_graph(graph))

    async def _loaded_for(self, request: ClassifyRequest) -> Graph:
        if request.is_probe:
            raise NotReadyError(f"the model set {self._name!r} is not in memory")
        if (problem := self.problem) is not None:
            raise problem
        last_s = (1 - WAIT_SHARE) * request.left_s
        try:
            async with asyncio.timeout(WAIT_SHARE * request.left_s):
                await self.load()
        except (TimeoutError, asyncio.CancelledError) as error:
            # On a busy loop the request's own time may end in the same moment.
            if isinstance(error, asyncio.CancelledError) and request.left_s > last_s:
                raise  # the caller has gone
            raise NotReadyError(
                f"loading the model set {self._name!r} takes longer than this request's "
                f"{request.timeout_s:.3g} s; {IN_A_SECOND}"
            ) from error
        assert self._graph is not None
        return self._graph

    async def _load(self) -> None:
        started = self._clock()
        try:
            self._graph = await self._load_graph()
        except Exception as error:
            reason = error.message if isinstance(error, TandemError) else repr(error)
            logger.error("model set %s cannot be loaded: %s", self._name, reason)
            self._failed_at = self._clock()
            self._problem = (
                f"the model set {self._name!r} cannot be loaded; the service's log says why; "
                f"loading is tried again in {FAILED_FOR_S:g} s"
            )
        else:
            self._problem, self._asked_at = None, self._clock()
            logger.info("model set %s: loaded in %.1f s", self._name, self._asked_at - started)
        finally:
            self._loading = None
