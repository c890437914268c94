"""Routes a call to a replica on the caller's node, unless one elsewhere is less busy.

A call carries decoded images (150 KB each at 224 px), and every image goes to every member. Serve's
own router takes two replicas of all by chance, so that of two nodes' traffic half crosses the
network; its locality option stays on the node until the replica there is full, however long its
queue. This one weighs both: a replica elsewhere is taken when its queue is shorter by more than
``LOCALITY_SLACK``, whatever the distance (tests/load/locality.py). And one that says nothing any
more is called by nobody (:mod:`app.calls.replicas`), long before Serve's health checks find
it.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from app.calls.replicas import FailureDetector, KnownReplicas, is_silent, note_replicas

T = TypeVar("T")


class DeploymentID(Protocol):
    """Serve's, by what is read of it."""

    name: str
    app_name: str


LOCALITY_SLACK = 1  # calls under way by which the near queue may be the longer one


def rank_replicas(
    near: Sequence[T], far: Sequence[T], queue_len: Callable[[T], int | None]
) -> list[list[T]]:
    """Return candidates in ranks, the preferred first: at most two replicas.

    They are one from each side, or two of the side that there is. ``queue_len`` tells the calls
    under way at a replica, None if that is not known; then both are one rank, and Serve asks them.
    Of several on one side the better of two taken by chance is compared (the power of two choices:
    Mitzenmacher, 2001).
    """

    def two_of(side: Sequence[T]) -> list[T]:
        return random.sample(side, min(2, len(side)))

    if not near or not far:
        return [two_of(near or far)]
    here, there = (min(two_of(s), key=lambda replica: queue_len(replica) or 0) for s in (near, far))
    queues = queue_len(here), queue_len(there)
    if queues[0] is None or queues[1] is None:
        return [[here, there]]
    return [[here], [there]] if queues[0] <= queues[1] + LOCALITY_SLACK else [[there], [here]]


class LocalityRouter(FIFOMixin, RequestRouter):
    """Serve's router, but for the choice; the ``request_router_config`` of the stages names it.

    Its parts are in Serve's public interface, which is alpha (:mod:`app.calls.ray_features`).
    """

    def __init__(
        self, deployment_id: DeploymentID, self_node_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(deployment_id=deployment_id, **kwargs)  # type: ignore[no-untyped-call]
        self._called, self._node_id = deployment_id, self_node_id
        self._failure_detector = FailureDetector()
        self._asking: set[asyncio.Task[None]] = set()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Note a call that is sent: the replica will say that it has it."""
        super().on_send_request(replica_id)
        self._failure_detector.call_sent(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Note what a replica says of its queue."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._failure_detector.heard_from(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take what Serve says there is."""
        super().update_replicas(replicas)
        near = tuple(r.replica_id.unique_id for r in replicas if r.node_id == self._node_id)
        known = KnownReplicas(len(replicas), near)
        note_replicas(self._called.app_name, self._called.name, known)
        self._failure_detector.retain(r.replica_id for r in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the ranks of one attempt; Serve takes the first replica that has room."""
        if pending_request is not None:  # all are considered: the next attempt may wait
            pending_request.routing_context.should_backoff = True
        candidates = self._speaking(candidate_replicas)
        near = [r for r in candidates if r.node_id == self._node_id]
        far = [r for r in candidates if r.node_id != self._node_id]
        return rank_replicas(near, far, lambda r: self.replica_queue_len_cache.get(r.replica_id))

    def _speaking(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Return those that are not silent, or all if all are; ask the silent ones how they are."""
        silent = [r for r in replicas if self._is_silent(r.replica_id)]
        if not silent:
            return replicas
        for replica in silent:
            if self._failure_detector.should_probe(replica.replica_id):
                task = asyncio.create_task(self._ask(replica))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        return [r for r in replicas if r not in silent] or replicas

    def _is_silent(self, replica_id: ReplicaID) -> bool:
        return self._failure_detector.is_suspected(replica_id) or is_silent(replica_id.unique_id)

    async def _ask(self, replica: RunningReplica) -> None:
        """Ask how long its queue is; one that does not answer in time stays under suspicion."""
        within_s = self.queue_len_response_deadline_s
        try:
            async with asyncio.timeout(within_s):
                queue_len = await replica.get_queue_len(deadline_s=within_s)
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except ActorUnavailableError:
            self.on_replica_actor_unavailable(replica.replica_id)
        except TimeoutError:
            pass
        else:
            self.on_new_queue_len_info(replica.replica_id, queue_len)
