"""Stages that are deployments of their own, called through their handles or over channels.

Each class has the methods of its stage (:mod:`app.graph.members`), so the graph does not know where
a stage runs. Calls to the Decoder and the members carry many requests
(:mod:`app.serve.shared_calls`). Each request keeps its own lane, time limit, trace and error. It
is hedged after half of its time, and repeated on another replica if one dies
(:mod:`app.graph.attempts`). Requests of a call whose replica died never share a call again: one of
the files may have killed the replica, and would do so again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

from ray.serve.handle import DeploymentHandle

from app.answers import Combined, Decoded, MemberAnswer
from app.errors import UPDATING, HeavyFileError, OtherSetError
from app.graph.attempts import HEDGE_AFTER_SHARE, HedgeBudget, hedged, retry
from app.queueing.fairness import CALLER
from app.queueing.scheduler import Lane
from app.serve.channels import ChannelPool, known_replicas
from app.serve.shared_calls import (
    CLASSIFIED,
    DECODED,
    SIZES,
    CallBatcher,
    MessageError,
    Part,
    Question,
    SharedCall,
    calls_at_once,
    check,
    pack_call,
)
from app.telemetry.spans import current_ids, untraced
from models.ensemble import Probabilities
from models.errors import TandemError
from models.network import Pixels
from models.picture_regions import PictureRegion

A = TypeVar("A")
StageHandle: TypeAlias = DeploymentHandle[Any]
TimedQuestion = tuple[Question, float]  # and its deadline by time.monotonic
hedge_budget = HedgeBudget()  # shared by all calls of this process


class SharedCalls(Generic[A]):
    """Calls of one method of a deployment; each carries the questions of several requests.

    ``method`` takes and returns messages of :mod:`app.serve.shared_calls`. ``read`` decodes an
    answer into an entry for each question. ``sizes`` are the preferred ones of calls, in images.
    Without ``channels`` to replicas on this node every call goes through Ray.
    """

    def __init__(
        self,
        handle: StageHandle,
        method: str,
        read: Callable[[bytes], Sequence[A | TandemError]],
        sizes: Sequence[int] = SIZES,
        channels: ChannelPool | None = None,
    ) -> None:
        self._channels, self._read = channels, read
        self._handle, self._name = handle, method
        # Contexts of no request, since Serve cancels calls when their request ends.
        self._batcher: CallBatcher[TimedQuestion, A] = CallBatcher(
            self._send,
            sizes,
            lambda: known_replicas(handle.app_name, handle.deployment_name).num,
            untraced().copy,
        )

    async def ask(self, question: Question, num_images: int, num_bytes: int, lane: Lane) -> A:
        """Return the answer to a question.

        ``num_bytes`` is the size of the question or of its answer, whichever is larger.

        Raises:
            RayError, RayServeException: the replicas are gone or full.
            TandemError: the error that the stage raised.
        """
        expires = time.monotonic() + question.left_s
        asked = question, expires
        together = partial(self._batcher.submit, asked, num_images, num_bytes, lane)
        alone = partial(together, is_alone=True)

        async def first() -> A:
            try:
                return await retry(together, alone)
            except HeavyFileError:
                return await retry(alone)

        after_s = HEDGE_AFTER_SHARE * question.left_s
        return await hedged(first, after_s, hedge_budget, num_images, lambda: retry(alone))

    async def _send(
        self, lane: Lane, parts: Sequence[Part[TimedQuestion, A]], is_alone: bool
    ) -> Sequence[A | TandemError]:
        now = time.monotonic()
        questions = [
            question._replace(left_s=expires - now)
            for question, expires in (part.content for part in parts)
        ]
        message = await self._call(pack_call(SharedCall(questions, lane, is_alone)))
        try:
            answers = self._read(message)
            check(len(answers) == len(parts), f"{len(answers)} answers for {len(parts)} parts")
        except MessageError as error:
            raise OtherSetError(f"{self._name}: {error}; {UPDATING}") from error
        self._batcher.calls_per_replica = calls_at_once(message)
        return answers

    async def _call(self, message: bytes) -> bytes:
        """Make a call over a channel, or through Ray if there is no channel to choose."""
        channel = self._channels.choose(self._batcher.calls_per_replica) if self._channels else None
        if channel is not None:
            return await channel.call(message)
        answer: bytes = await self._method.remote(message)
        return answer

    @cached_property
    def _method(self) -> StageHandle:
        """Return the handle's method, looked up at the first call: then Serve makes its router."""
        return self._handle.options(method_name=self._name)


def _caller() -> tuple[str, float, bool]:
    caller = CALLER.get()
    return caller.name, caller.share, caller.has_key


class RemoteDecoder:
    """The Decoder deployment; a decoded image has ``image_bytes`` bytes."""

    def __init__(
        self, handle: StageHandle, image_bytes: int = 0, channels: ChannelPool | None = None
    ) -> None:
        self._calls = SharedCalls(handle, "decode_many", DECODED.read, channels=channels)
        self._image_bytes = image_bytes

    async def decode(
        self, files: list[bytes], left_s: float, lane: Lane, regions: Sequence[PictureRegion] = ()
    ) -> Decoded:
        """Decode files; see :meth:`app.stages.decoder.Decoder.decode`."""
        num_images = len(regions or files)
        num_bytes = max(sum(map(len, files)), num_images * self._image_bytes)
        question = Question(files, None, left_s, current_ids(), _caller(), regions)
        return await self._calls.ask(question, num_images, num_bytes, lane)


class RemoteMember:
    """A Classifier deployment with batches of ``sizes`` images."""

    def __init__(
        self, handle: StageHandle, sizes: Sequence[int] = SIZES, channels: ChannelPool | None = None
    ) -> None:
        self._calls = SharedCalls(handle, "classify_many", CLASSIFIED.read, sizes, channels)

    async def classify(
        self, images: Pixels, left_s: float, lane: Lane, *, has_features: bool = False
    ) -> MemberAnswer:
        """Run a member; see :meth:`app.stages.classifier.Classifier.classify`."""
        question = Question((), images, left_s, current_ids(), _caller(), has_features=has_features)
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
        step: int | None = None,
        *,
        has_set: bool = False,
    ) -> list[Combined]:
        """Average members; see :meth:`app.stages.combiner.Combiner.combine`."""
        num_images = max(map(len, members.values()), default=0)
        asked = () if threshold is None and step is None else (math.inf, threshold, step)
        sets = {"has_set": True} if has_set else {}
        remote = partial(self._handle.combine.remote, members, top_k, *asked, **sets)
        after_s = HEDGE_AFTER_SHARE * left_s
        return await hedged(lambda: retry(remote), after_s, hedge_budget, num_images)
