"""Stages that are deployments of their own, called through their handles.

Each class has the methods of the stage that it stands for (:mod:`app.graph.stages`), so the graph
does not know where a stage runs. A call whose replica dies is made again on another one
(:mod:`app.calls.retry`), and a second call is made when half of its time is over without an answer
(:mod:`app.calls.hedge`).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ray.serve.handle import DeploymentHandle

from app.calls.hedge import HEDGE_AFTER_SHARE, HedgeBudget, hedged
from app.calls.retry import retry
from app.messages import Combined, Decoded, MemberAnswer
from app.queueing.priority import Lane
from models.ensemble import Probabilities
from models.runtime import Pixels

T = TypeVar("T")
StageHandle: TypeAlias = DeploymentHandle[Any]
_hedge_budget = HedgeBudget()  # of all calls of this process


class RemoteDecoder:
    """The Decoder deployment."""

    def __init__(self, handle: StageHandle) -> None:
        self._handle = handle

    async def decode(self, files: list[bytes], left_s: float, lane: Lane) -> Decoded:
        """Decode files; see :meth:`app.deployments.decoder.Decoder.decode`."""
        return await call_remote(self._handle.decode.remote, files, left_s, lane, left_s=left_s)


class RemoteMember:
    """A Classifier deployment."""

    def __init__(self, handle: StageHandle) -> None:
        self._handle = handle

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Run a member; see :meth:`app.deployments.classifier.Classifier.classify`."""
        return await call_remote(self._handle.classify.remote, images, left_s, lane, left_s=left_s)


class RemoteCombiner:
    """The Combiner deployment."""

    def __init__(self, handle: StageHandle) -> None:
        self._handle = handle

    async def combine(
        self, members: Mapping[str, Probabilities], top_k: int, left_s: float
    ) -> list[Combined]:
        """Average members; see :meth:`app.deployments.combiner.Combiner.combine`."""
        return await call_remote(self._handle.combine.remote, members, top_k, left_s=left_s)


async def call_remote(remote: Callable[..., Awaitable[T]], *args: object, left_s: float) -> T:
    """Call a deployment's method; ``remote`` is a handle's ``method.remote``.

    Raises:
        RayError, RayServeException: the replicas are gone or full, or the stage raised.

    """
    return await hedged(
        lambda: retry(lambda: remote(*args)), HEDGE_AFTER_SHARE * left_s, _hedge_budget
    )
