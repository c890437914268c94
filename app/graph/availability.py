"""Whether a set can answer: rolling updates, networks loaded on demand, readiness, repeated calls.

Each class here wraps a :class:`Graph`. If stages are deployments of their own, Serve replaces each
at its own pace. An answer must come from one set, and no request may fail. So every stage reports
which set it serves, a new Gateway waits for members of its set, and an old Gateway forwards
requests that it can no longer answer.

**Retries.** Classifying is idempotent. If a replica is gone before it has a call, Serve sends the
call to another. If the replica dies with the call, the caller gets an error, since Serve cannot
know whether repeating it does harm. Then :func:`retry` repeats it.

**Hedges.** A replica that hangs, or whose node is unreachable, raises no error: its requests would
wait until their time is over. So a call without an answer after half of its time is made a second
time. By then the router knows which replicas are silent (:mod:`app.serve.locality_router`), and the
second call goes to another. (J. Dean and L. A. Barroso, The Tail at Scale, 2013; the budget follows
gRPC's retry throttling.)
"""

import asyncio
import base64
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException

from app.answers import Fault
from app.errors import (
    IN_A_SECOND,
    MORE_TIME,
    DeadlineError,
    NoMemoryError,
    NotReadyError,
    OtherSetError,
    OverloadedError,
    UnknownModelError,
)
from app.graph.request import ClassifyRequest, RequestAnswers
from app.telemetry.metrics import RequestObserver
from app.telemetry.spans import untraced_task
from models.errors import TandemError

AGAIN_AFTER_S = 0.05  # pause before a request is forwarded again
# A Gateway's only replica forwards to itself. Through Ray 2.60 about one in a thousand such calls
# gets no reply, although it was answered (decision 0058). Then it is made again.
PATIENCE_S = 0.5
# The share of a request's time that it may wait for the load; the rest is for its answer.
WAIT_SHARE = 0.9
FAILED_FOR_S = 10.0  # how long a failed load is not tried again, and requests get its error
# A PNG of one grey pixel, the smallest picture that passes every stage.
WARM_UP_IMAGE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)
PROBE_TIMEOUT_S = 10.0
START_POLL_S = 0.5
READY_FOR_S = 5.0  # how long an answer counts as proof of readiness, before the next probe
logger = logging.getLogger("ray.serve")
T = TypeVar("T")
CALL_ERRORS = (RayError, RayServeException)  # raised by calls through a handle
# A request that kills replicas must not go through all of them.
MAX_CALLS = 3
# In the shortest pause Serve's router marks the dead replica. A deadline ends a pause as it ends
# any wait. Pauses are random, so that a deadly request meets other requests each time.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.2
HEDGE_AFTER_SHARE = 0.5
# Images of second calls per image of first calls, in the long run: an overloaded stage must not get
# twice the work. And the number that may be saved up.
PER_IMAGE, MOST_SAVED = 0.1, 20.0


class Graph(Protocol):
    """Answers requests, as :class:`app.graph.ensemble.Ensemble` does."""

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer every file of a request."""


async def run_in_time(graph: Graph, request: ClassifyRequest) -> RequestAnswers:
    """Answer a request within the time that it has left.

    Raises:
        OverloadedError, DeadlineError, NotReadyError: the whole request failed.
    """
    try:
        async with asyncio.timeout(request.left_s):
            return await graph.run(request)
    except TimeoutError as error:
        raise DeadlineError(
            f"no answer within {request.timeout_s:.3g} s; "
            f"the service is busy or a member hangs: {MORE_TIME}"
        ) from error
    except CALL_ERRORS as error:
        raise as_tandem(error) from error


class ForwardingGraph:
    """A graph that forwards requests it cannot answer to other replicas of its Gateway.

    In a rolling update, newer replicas serve the set that this replica's stages have changed to.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._handle: Any = None
        self._hedge_budget = HedgeBudget()

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Run the graph; while its stages serve another set, forward the request and retry.

        The caller limits the time.
        """
        while True:
            try:
                return await self._graph.run(request)
            except OtherSetError as error:
                # A probe is about this Gateway's own stages.
                if request.is_probe or (handle := self._peer()) is None:
                    raise error
            try:
                return await self._forward(handle, request)
            except OtherSetError:
                await asyncio.sleep(AGAIN_AFTER_S)

    async def _forward(self, handle: Any, request: ClassifyRequest) -> RequestAnswers:
        async def once() -> RequestAnswers | TandemError:
            try:
                forwarded = request.forwarded()
                answers: RequestAnswers = await handle.handle_forwarded.remote(forwarded)
            except (TandemError, *CALL_ERRORS) as error:
                return as_tandem(error)  # an error is an answer too, and ends the attempts
            return answers

        after_s = min(PATIENCE_S, HEDGE_AFTER_SHARE * request.left_s)
        answers = await hedged(once, after_s, self._hedge_budget, request.num_images)
        if isinstance(answers, TandemError):
            raise answers
        return answers

    def _peer(self) -> Any:
        """Return a handle of this deployment, or None outside of Serve."""
        if self._handle is None:
            try:
                context = serve.get_replica_context()
            except RayServeException:
                return None
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return self._handle


class OnDemandGraph:
    """The graph of one set, which may be unloaded; for one event loop.

    ``graph`` is loaded now. ``load`` builds it again, which takes seconds; it may raise anything.
    ``unload`` frees a graph that gets no more requests. :meth:`unload_idle` does so after the set
    was idle for ``unload_after_s``; None: never.
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
            if self._unloading is not None:  # its memory is free only then
                await asyncio.wait([self._unloading])
            self._graph = await self._load_graph()
        except Exception as error:
            reason = error.message if isinstance(error, TandemError) else repr(error)
            logger.error("model set %s cannot be loaded: %s", self._name, reason)
            self._failed_at = self._clock()
            why = reason if isinstance(error, NoMemoryError) else "the service's log says why"
            self._problem = (
                f"the model set {self._name!r} cannot be loaded; {why}; "
                f"loading is tried again in {FAILED_FOR_S:g} s"
            )
        else:
            self._problem, self._asked_at = None, self._clock()
            logger.info("model set %s: loaded in %.1f s", self._name, self._asked_at - started)
        finally:
            self._loading = None


class Readiness:
    """Sends the warm-up image through ``graph``, and remembers its success for a while.

    The graph is ready when enough members answer for the answer policy: by default all.

    Readiness is about health, not load: a balancer that takes a busy replica out of rotation sends
    its share to the others, which are as busy. So a refusal for lack of room (429) does not make a
    replica unready that has answered before.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ready_until = 0.0
        self._has_answered = False
        self._probe: asyncio.Task[None] | None = None

    def note_answer(self) -> None:
        """Record that the graph has just answered, so that no probe is needed for a while."""
        self._has_answered = True
        self._ready_until = time.monotonic() + READY_FOR_S

    async def wait(self) -> None:
        while True:
            with contextlib.suppress(NotReadyError):
                await self.check()
                return
            await asyncio.sleep(START_POLL_S)

    async def check(self) -> None:
        """Send the warm-up image through the graph, unless it has answered lately.

        Raises:
            NotReadyError: a stage does not answer, and not because it is busy.
        """
        if time.monotonic() < self._ready_until:
            return
        if self._probe is None:  # concurrent checks share one probe
            self._probe = untraced_task(self._probe_graph())
            self._probe.add_done_callback(lambda _: setattr(self, "_probe", None))
        await asyncio.shield(self._probe)

    async def _probe_graph(self) -> None:
        probe = ClassifyRequest(
            [WARM_UP_IMAGE], 1, PROBE_TIMEOUT_S, "warm-up", RequestObserver(), is_probe=True
        )
        try:
            results = await run_in_time(self._graph, probe)
        except OverloadedError as error:
            if self._has_answered:  # busy, but healthy
                return
            raise NotReadyError(f"the warm-up image was refused: {error.message}") from error
        except TandemError as error:
            raise NotReadyError(f"the warm-up image got no answer: {error.message}") from error
        except Exception as error:  # of a runtime, in this process
            text = f"the warm-up image failed: {type(error).__name__}: {error}"
            raise NotReadyError(text) from error
        if isinstance(results[0], Fault):
            raise NotReadyError(f"the warm-up image failed: {results[0].message}")
        self.note_answer()


async def retry(
    call: Callable[[], Awaitable[T]],
    again: Callable[[], Awaitable[T]] | None = None,
    pause_s: Callable[[], float] = lambda: random.uniform(PAUSE_S, LONGEST_PAUSE_S),
) -> T:
    """Repeat a call while its replica dies, up to ``MAX_CALLS`` calls.

    ``again`` makes the repeated calls; None: ``call`` does. ``pause_s`` returns the time before
    each.

    Raises:
        RayActorError: the replica of the last call died as well.
    """
    for _ in range(MAX_CALLS - 1):
        try:
            return await call()
        except RayActorError:  # died or unreachable; a stage's own errors are of other classes
            await asyncio.sleep(pause_s())
            call = again or call
    return await call()


class HedgeBudget:
    """The number of images that second calls may still have."""

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self, num_images: int) -> None:
        self._saved = min(MOST_SAVED, self._saved + PER_IMAGE * num_images)

    def spend(self, num_images: int) -> bool:
        """Take ``num_images`` from the budget; return False if it is spent.

        A call with more images than are saved is allowed, since large forms would otherwise never
        be. Then the budget is negative until first calls have made up for it.
        """
        if self._saved < 1:
            return False
        self._saved -= num_images
        return True


async def hedged(
    call: Callable[[], Awaitable[T]],
    after_s: float,
    budget: HedgeBudget,
    num_images: int,
    again: Callable[[], Awaitable[T]] | None = None,
) -> T:
    """Return the answer of a call, or of a second call made ``after_s`` later.

    The slower of the two is cancelled. If both fail, the last error is raised. ``budget`` must have
    ``num_images`` for the second call, which ``again`` makes; None: ``call`` does. None is made if
    ``after_s`` is not positive.
    """
    budget.earn(num_images)
    calls = {asyncio.ensure_future(call())}
    try:
        done, _ = await asyncio.wait(calls, timeout=after_s)
        if not done and after_s > 0 and budget.spend(num_images):
            calls.add(asyncio.ensure_future((again or call)()))
        waiting = set(calls)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if good := [each for each in done if not each.cancelled() and not each.exception()]:
                return good[0].result()
            if not waiting:
                return done.pop().result()
    finally:
        for each in calls:
            each.cancel()


def as_tandem(error: BaseException) -> TandemError:
    """Return a stage's own error; any other error becomes "the stage is unavailable"."""
    if isinstance(error, BackPressureError):
        return OverloadedError(f"every queue place is taken; {IN_A_SECOND}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TandemError):
        return cause
    if isinstance(cause, TaskCancelledError):
        return DeadlineError(f"the request was cancelled on its way through the graph; {MORE_TIME}")
    return NotReadyError(f"a stage of the graph failed ({type(cause).__name__}); try again")
