"""What every replica does beside its stage's work: started once per process, reported to Serve."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray import serve

from app.calls.channels.frames import IS_THERE, address_of
from app.calls.channels.server import ChannelServer
from app.calls.messages import (
    MessageError,
    Question,
    SharedCall,
    pack_classified,
    pack_decoded,
    read_call,
)
from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.deployments.grpc_server import keep_to_loopback, limit_unread
from app.errors import UPDATING, OtherSetError
from app.grpc.receiver import max_message_bytes
from app.messages import Decoded, MemberAnswer
from app.metrics.replica import start_metrics
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.parents import continue_below
from app.tracing.pipeline import pipeline
from models.errors import TandemError

# So many more objects than were before make the garbage collector look at the new ones; Python's
# 700 are those of some requests under way, at which it looked again and again.
YOUNG_OBJECTS = 5_000
A = TypeVar("A")
logger = logging.getLogger("ray.serve")


def start_replica(settings: Settings, *, is_ingress: bool = False) -> None:
    """Start what a replica's process has once: loopback, tracing, metrics; nothing outside Ray."""
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    keep_to_loopback()
    if is_ingress:
        limit_unread(max_message_bytes(settings.max_body_bytes))
    pipeline.start(settings, is_ingress=is_ingress)
    start_metrics()


class StageReplica:
    """A stage that is a deployment of its own."""

    usage: Usage

    def __init__(self, settings: Settings, *args: Any) -> None:
        start_replica(settings)
        super().__init__(settings, *args)  # type: ignore[call-arg]  # the stage's, which is next

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaling policy; Serve calls this when the stage scales."""
        return self.usage.figures()


class SharedStageReplica(StageReplica):
    """A stage whose calls many requests share; Gateways on its node make them over a channel.

    ``answer_many`` takes a call's message and gives its answer's (:func:`decode_many`).
    """

    answer_many: Callable[..., Awaitable[bytes]]

    def __init__(self, settings: Settings, *args: Any) -> None:
        super().__init__(settings, *args)
        self._wants_channel = settings.local_channels and IS_THERE
        self._channel: ChannelServer | None = None
        # Serve, which sees no calls of a channel, awaits this before it ends the process. It finds
        # it on the object; the garbage collector looks at the class, and so never calls it.
        self.__del__ = self._drain

    async def check_health(self) -> None:
        """Tell Serve whether this replica works; the first time, begin to listen."""
        if self._wants_channel and self._channel is None:
            await self._listen()
        await super().check_health()  # type: ignore[misc]  # the stage's

    async def _listen(self) -> None:
        replica = serve.get_replica_context()
        address = address_of(replica.app_name, replica.deployment, replica.replica_id.unique_id)
        channel = ChannelServer(address, self.answer_many)
        try:
            await channel.start()
        except OSError as error:  # the next check tries again
            logger.warning("no channel; calls go through Ray: %s", error)
        else:
            self._channel = channel

    async def _drain(self) -> None:
        if self._channel is not None:
            await self._channel.drain()


async def decode_many(decoder: Decoder, message: bytes) -> bytes:
    """Decode the files of many requests; a large picture among those of others is sent back."""
    call = _call_of(message)

    async def decode(question: Question) -> Decoded:
        files, left_s = list(question.files), question.left_s
        return await decoder.decode(files, left_s, call.lane, takes_heavy=call.is_alone)

    return pack_decoded(await _each(call, decode), decoder.calls_at_once)


async def classify_many(member: Classifier, message: bytes) -> bytes:
    """Run a member on the images of many requests."""
    call = _call_of(message)

    async def classify(question: Question) -> MemberAnswer:
        if question.images is None:
            raise OtherSetError(f"a member was sent files; {UPDATING}")
        return await member.classify(question.images, question.left_s, call.lane)

    return pack_classified(await _each(call, classify), member.calls_at_once)


def _call_of(message: bytes) -> SharedCall:
    try:
        return read_call(message)
    except MessageError as error:
        raise OtherSetError(f"{error}; {UPDATING}") from error


async def _each(
    call: SharedCall, answer: Callable[[Question], Awaitable[A]]
) -> list[A | BaseException]:
    """Return what became of each part; an error is its own. If the call is ended, all end."""

    async def part(question: Question) -> A:
        continue_below(question.span)  # each part runs in a context of its own
        return await answer(question)

    answers = await asyncio.gather(*map(part, call.questions), return_exceptions=True)
    for error in answers:
        if isinstance(error, Exception) and not isinstance(error, TandemError):
            logger.error("a part of a call failed: %r", error, exc_info=error)
    return answers


class DecoderReplica(SharedStageReplica, Decoder):
    """The Decoder as a deployment."""

    async def decode_many(self, message: bytes) -> bytes:
        return await decode_many(self, message)

    answer_many = decode_many


class ClassifierReplica(SharedStageReplica, Classifier):
    """One member as a deployment."""

    async def classify_many(self, message: bytes) -> bytes:
        return await classify_many(self, message)

    answer_many = classify_many


class CombinerReplica(StageReplica, Combiner):
    """The Combiner as a deployment."""
