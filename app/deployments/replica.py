"""Replicas of the stages: a process's set-up, reports to Serve, and calls shared by requests."""

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
from app.compute.serve_log import write_to_stderr_as_to_files
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

# The garbage collector runs after this many new objects. Python's default, 700, is reached by a few
# requests under way, so that it would check them again and again.
YOUNG_OBJECTS = 5_000
A = TypeVar("A")
logger = logging.getLogger("ray.serve")


def start_replica(settings: Settings, *, is_ingress: bool = False) -> None:
    """Set up a replica's process: log, loopback, tracing and metrics."""
    write_to_stderr_as_to_files()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    keep_to_loopback()
    if is_ingress:
        limit_unread(max_message_bytes(settings.max_body_bytes))
    pipeline.start(settings, is_ingress=is_ingress)
    start_metrics()


class StageReplica:
    """The base class of a stage that is a deployment of its own."""

    usage: Usage

    def __init__(self, settings: Settings, *args: Any) -> None:
        start_replica(settings)
        super().__init__(settings, *args)  # type: ignore[call-arg]  # the stage's, next in the MRO

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return statistics for the autoscaling policy; Serve calls this if the stage scales."""
        return self.usage.figures()


class SharedStageReplica(StageReplica):
    """A stage with calls that many requests share; Gateways on its node call it over a channel.

    ``answer_many`` takes the message of a call and returns that of its answer.
    """

    answer_many: Callable[..., Awaitable[bytes]]

    def __init__(self, settings: Settings, *args: Any) -> None:
        super().__init__(settings, *args)
        self._wants_channel = settings.local_channels and IS_THERE
        self._channel: ChannelServer | None = None
        # Serve, which does not see calls of a channel, awaits this before it ends the process. Set
        # on the object, where Serve finds it and the garbage collector, which checks classes, does
        # not.
        self.__del__ = self._drain

    async def check_health(self) -> None:
        """Raise if this replica does not work; the first call begins to listen."""
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
            logger.warning("cannot open a channel, so calls go through Ray: %s", error)
        else:
            self._channel = channel

    async def _drain(self) -> None:
        if self._channel is not None:
            await self._channel.drain()


async def decode_many(decoder: Decoder, message: bytes) -> bytes:
    """Decode the files of many requests; refuse a large picture in a call shared with others."""
    call = _call_of(message)

    async def decode(question: Question) -> Decoded:
        files, left_s = list(question.files), question.left_s
        return await decoder.decode(files, left_s, call.lane, takes_heavy=call.is_alone)

    return pack_decoded(await _each(call, decode), decoder.calls_at_once)


async def classify_many(member: Classifier, message: bytes) -> bytes:
    """Classify the images of many requests with a member."""
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
    """Return each part's answer or error; cancelling the call cancels all parts."""

    async def part(question: Question) -> A:
        continue_below(question.span)  # in the part's own context
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
