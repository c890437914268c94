"""Readiness: whether enough members answer, as requests or our own probe show.

Readiness is about health, not load: a balancer that takes a busy replica out of rotation sends its
share to the others, which are as busy. So a refusal for lack of room (429) does not make a replica
unready that has answered before.
"""

import asyncio
import base64
import contextlib
import time

from app.answers import Fault
from app.errors import NotReadyError, OverloadedError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.graph.rolling_update import Graph, run_in_time
from app.telemetry.spans import untraced_task
from models.errors import TandemError

# A PNG of one grey pixel, the smallest picture that passes every stage.
WARM_UP_IMAGE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)
PROBE_TIMEOUT_S = 10.0
START_POLL_S = 0.5
READY_FOR_S = 5.0  # how long an answer counts as proof of readiness, before the next probe


class Readiness:
    """Sends the warm-up image through ``graph``, and remembers its success for a while.

    The graph is ready when enough members answer for the answer policy: by default all.
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
            [WARM_UP_IMAGE],
            1,
            PROBE_TIMEOUT_S,
            "warm-up",
            RequestObserver(),
            may_skip=False,
            is_probe=True,
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
