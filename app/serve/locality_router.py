"""Routes a call to a replica on the caller's node, unless one elsewhere is less busy.

A call carries decoded images (150 KB each at 224 px), and every image goes to every member. Serve's
own router draws two replicas of all, so with two nodes half of the traffic crosses the network. Its
locality option stays on the node until the replica there is full, however long its queue. This
router weighs both: it takes a replica elsewhere if its queue is shorter by more than
``LOCALITY_SLACK`` (decision 0063).

A replica is suspected if it has not acknowledged a call within ``SUSPECT_AFTER_S``. It acknowledges
a call before it starts to work, with its number of calls. So a healthy replica is not suspected for
being busy.
"""

import asyncio
import random
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from app.serve.channels import SUSPECT_AFTER_S, KnownReplicas, is_silent, note_replicas

T = TypeVar("T")
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 0.1  # for a replica's queue length, as in Serve's own routers
LATE_S, LATE_FOR_S = 0.5, 10.0  # of an acknowledgement; for which it is remembered
LOCALITY_SLACK = 1  # calls by which the queue on this node may be longer


class DeploymentID(Protocol):
    """The attributes of Serve's class that are read here."""

    name: str
    app_name: str


def rank_replicas(
    near: Sequence[T], far: Sequence[T], queue_len: Callable[[T], int | None]
) -> list[list[T]]:
    """Return candidates in ranks, the preferred first: at most two replicas.

    Two replicas of each side are drawn and the better one is kept (the power of two choices:
    Mitzenmacher, 2001). If a side is empty, both drawn replicas of the other are returned.
    ``near`` are on this node. ``queue_len`` returns the calls under way at a replica, or None if
    unknown. Then all candidates have the same rank, and Serve asks them.
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


class FailureDetector:
    """A failure detector: tracks by replica id when calls were sent and when it was last heard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unheard_since: dict[Hashable, float] = {}
        self._next_ask: dict[Hashable, float] = {}
        self._late_until: dict[Hashable, float] = {}

    def call_sent(self, replica: Hashable) -> None:
        self._unheard_since.setdefault(replica, self._clock())

    def heard_from(self, replica: Hashable) -> None:
        now = self._clock()
        if now - self._unheard_since.pop(replica, now) > LATE_S:
            self._late_until[replica] = now + LATE_FOR_S
        self._next_ask.pop(replica, None)

    def retain(self, replicas: Iterable[Hashable]) -> None:
        known = set(replicas)
        for by_replica in (self._unheard_since, self._next_ask, self._late_until):
            for gone in by_replica.keys() - known:
                del by_replica[gone]

    def is_suspected(self, replica: Hashable) -> bool:
        """Whether a call has been unacknowledged for too long, or was acknowledged late."""
        now = self._clock()
        since = self._unheard_since.get(replica, now)
        return now - since > SUSPECT_AFTER_S or now < self._late_until.get(replica, now)

    def should_probe(self, replica: Hashable) -> bool:
        """Whether a silent replica should be probed now; limits the rate of probes."""
        now = self._clock()
        if now < self._next_ask.get(replica, now):
            return False
        self._next_ask[replica] = now + PROBE_EVERY_S
        return True


class LocalityRouter(FIFOMixin, RequestRouter):
    """Serve's router with another choice of replicas; ``request_router_config`` names it.

    It uses a public interface of Serve that is alpha (:mod:`app.serve.ray_compatibility`).
    """

    def __init__(
        self, deployment_id: DeploymentID, self_node_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(deployment_id=deployment_id, **kwargs)  # type: ignore[no-untyped-call]
        self._called, self._node_id = deployment_id, self_node_id
        self._failure_detector = FailureDetector()
        self._asking: set[asyncio.Task[None]] = set()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Note that a call was sent, which the replica will acknowledge."""
        super().on_send_request(replica_id)
        self._failure_detector.call_sent(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._failure_detector.heard_from(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
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
        """Return the ranked replicas of an attempt; Serve takes the first with a free place."""
        if pending_request is not None:  # this attempt considers all replicas
            pending_request.routing_context.should_backoff = True
        candidates = self._speaking(candidate_replicas)
        near = [r for r in candidates if r.node_id == self._node_id]
        far = [r for r in candidates if r.node_id != self._node_id]
        return rank_replicas(near, far, lambda r: self.replica_queue_len_cache.get(r.replica_id))

    def _speaking(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Return the replicas that are not silent, or all if all are; probe the silent ones."""
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
        """Ask a replica for its queue length; without an answer in time it stays suspected."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                queue_len = await replica.get_queue_len(deadline_s=PROBE_TIMEOUT_S)
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except ActorUnavailableError:
            self.on_replica_actor_unavailable(replica.replica_id)
        except TimeoutError:
            pass
        else:
            self.on_new_queue_len_info(replica.replica_id, queue_len)
