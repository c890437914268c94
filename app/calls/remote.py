"""Stages that are deployments of their own, called through their handles.

Each class has the methods of the stage that it stands for (:mod:`app.graph.stages`), so the graph
does not know where a stage runs. The Decoder and the members are asked by many requests in one call
(:mod:`app.calls.batched`). A call whose replica dies is made again on another one, and a second
call is made when half of its time is over without an answer (:mod:`app.calls.attempts`).
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ray.serve.handle import DeploymentHandle

from app.calls.attempts import HEDGE_AFTER_SHARE, hedged, retry
from app.calls.batched import SharedCalls, hedge_budget
from app.calls.channels.pool import ChannelPool
from app.calls.messages import Question, read_classified, read_decoded
from app.messages import Combined, Decoded, MemberAnswer
from app.queueing.call_batcher import SIZES
from app.queueing.priority import Lane
from app.tracing.parents import current_ids
from models.ensemble import Probabilities
from models.runtime import Pixels

T = TypeVar("T")
StageHandle: TypeAlias = DeploymentHandle[Any]


class RemoteDecoder:
    """The Decoder deployment; its answers have images of ``image_bytes``."""

    def __init__(
        self,
        handle: StageHandle,
        image_bytes: int = 0,
        channels: ChannelPool | None = None,
    ) -> None:
        self._calls = SharedCalls(handle, "decode_many", read_decoded, channels=channels)
        self._image_bytes = image_bytes

    async def decode(self, files: list[bytes], left_s: float, lane: Lane) -> Decoded:
        """Decode files; see :meth:`app.deployments.decoder.Decoder.decode`."""
        num_bytes = max(sum(map(len, files)), len(files) * self._image_bytes)
        question = Question(files, None, left_s, current_ids())
        return await self._calls.ask(question, len(files), num_bytes, lane)


class RemoteMember:
    """A Classifier deployment, whose batches have ``sizes``."""

    def __init__(
        self,
        handle: StageHandle,
        sizes: Sequence[int] = SIZES,
        channels: ChannelPool | None = None,
    ) -> None:
        self._calls = SharedCalls(handle, "classify_many", read_classified, sizes, channels)

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Run a member; see :meth:`app.deployments.classifier.Classifier.classify`."""
        question = Question((), images, left_s, current_ids())
        return await self._calls.ask(question, len(images), images.nbytes, lane)


class RemoteCombiner:
    """The Combiner deployment."""

    def __init__(self, handle: StageHandle) -> None:
        self._handle = handle

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float,
        threshold: float | None = None,
    ) -> list[Combined]:
        """Average members; see :meth:`app.deployments.combiner.Combiner.combine`."""
        asked = () if threshold is None else (math.inf, threshold)
        num_images = max(map(len, members.values()), default=0)
        remote = partial(self._handle.combine.remote, members, top_k, *asked)
        return await call_remote(remote, num_images, left_s)


async def call_remote(remote: Callable[[], Awaitable[T]], num_images: int, left_s: float) -> T:
    """Call a deployment's method; ``remote`` is a handle's ``method.remote`` with its arguments.

    Raises:
        RayError, RayServeException: the replicas are gone or full, or the stage raised.

    """
    after_s = HEDGE_AFTER_SHARE * left_s
    return await hedged(lambda: retry(remote), after_s, hedge_budget, num_images)
