"""Keeps answers correct during a rolling update, while replicas of two model sets serve.

If stages are deployments of their own, Serve replaces each at its own pace. An answer must come
from one set, and no request may fail. So every stage reports which set it serves, a new Gateway
waits for members of its set, and an old Gateway forwards requests that it can no longer answer.
"""

import asyncio
from typing import Any, Protocol

from ray import serve
from ray.serve.exceptions import RayServeException

from app.errors import MORE_TIME, DeadlineError, OtherSetError
from app.graph.attempts import CALL_ERRORS, HEDGE_AFTER_SHARE, HedgeBudget, as_tandem, hedged
from app.graph.request import ClassifyRequest, RequestAnswers
from models.errors import TandemError

AGAIN_AFTER_S = 0.05
# A Gateway's only replica forwards to itself. Through Ray 2.60 about one in a thousand such calls
# gets no reply, although it was answered (decision 0058). Then it is made again.
PATIENCE_S = 0.5


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
        """Run the graph; while its stages serve another set, forward the request, then try again.

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
