"""The shadow lane: sends copies of live photos to versions, without delaying any client.

Copies run while no other image waits (:mod:`app.queueing.priority`). Their number is bounded:
further copies are dropped, and so are copies that did not begin in time.
"""

import asyncio
import logging
from collections.abc import Callable

from app.errors import DeadlineError, HeavyFileError, OverloadedError, UnhealthyError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, RequestAnswers, TensorRequest
from app.graph.rolling_update import Graph, run_in_time
from app.queueing.priority import SHADOW
from app.tracing.parents import untraced_task
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
MAX_IMAGES, MAX_BYTES = 16, 64 * 2**20  # under way at a time: images, and bytes of their files
COPY_TIME_S = 10.0  # the time limit of a copy, waiting included
# A copy that ends with one of these was dropped; the version did not fail.
DROPPED = (DeadlineError, OverloadedError, HeavyFileError)
Ended = Callable[[RequestAnswers | Exception], None]


class ShadowLane:
    """The copies that one process has under way; for one event loop."""

    def __init__(self) -> None:
        self._num_images = self._num_bytes = 0
        self._tasks: dict[asyncio.Task[None], Graph] = {}
        self._hanging: set[Graph] = set()

    def has_room(self, graph: Graph, files: list[bytes]) -> bool:
        """Whether copies of these files may be sent to a graph now."""
        return (
            graph not in self._hanging
            and self._num_images + len(files) <= MAX_IMAGES
            and self._num_bytes + sum(map(len, files)) <= MAX_BYTES
        )

    def retry(self) -> None:
        """Send copies again to graphs that hung before."""
        self._hanging.clear()

    def ask(self, graph: Graph, request: ClassifyRequest, ended: Ended) -> None:
        """Send a copy to a graph; ``ended`` is called on the loop with the answers or the error."""
        copy = ClassifyRequest(
            request.files,
            request.top_k,
            COPY_TIME_S,
            request.request_id,
            RequestObserver(),
            lane=SHADOW,
            is_probe=True,  # neither the cache nor other Gateways answer it
            tensors=TensorRequest(),
            threshold=request.threshold,
        )
        num_images, num_bytes = len(copy.files), sum(map(len, copy.files))
        self._num_images += num_images
        self._num_bytes += num_bytes
        task = untraced_task(self._run(graph, copy, ended))

        def over(_: asyncio.Task[None]) -> None:
            del self._tasks[task]
            self._num_images -= num_images
            self._num_bytes -= num_bytes
            if task.cancelled():  # behind one that hangs
                ended(UnhealthyError("the version hangs"))

        self._tasks[task] = graph  # a reference, so that the task is not garbage-collected
        task.add_done_callback(over)

    async def _run(self, graph: Graph, copy: ClassifyRequest, ended: Ended) -> None:
        try:
            ended(await run_in_time(graph, copy))
        except UnhealthyError as error:
            self._leave_alone(graph)
            logger.error("%s; its version gets no copies until the plan changes", error.message)
            ended(error)
        except TandemError as error:
            ended(error)
        except Exception as error:
            logger.exception("a copy in the shadow lane failed")
            ended(error)

    def _leave_alone(self, graph: Graph) -> None:
        """Send a hanging graph no more copies, and cancel those that wait for it."""
        self._hanging.add(graph)
        for task, of in self._tasks.items():
            if of is graph and task is not asyncio.current_task():
                task.cancel()
