"""Builds the stages of a model set in this process or as calls to others, and removes them again.

A remote stage is a deployment of its own, called through its handle or over channels. Its class has
the methods of its stage (:mod:`app.graph.members`), so the graph does not know where a stage runs.
Calls to the Decoder and the members carry many requests (:mod:`app.serve.shared_calls`). Each
request keeps its own lane, time limit, trace and error. It is hedged after half of its time, and
repeated on another replica if one dies (:mod:`app.graph.availability`). Requests of a call whose
replica died never share a call again: one of the files may have killed it, and would do so again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

from ray.serve.handle import DeploymentHandle

from app.answers import Combined, Decoded, MemberAnswer
from app.errors import UPDATING, HeavyFileError, NoMemoryError, OtherSetError
from app.graph.availability import HEDGE_AFTER_SHARE, HedgeBudget, hedged, retry
from app.graph.ensemble import Ensemble
from app.queueing.fairness import CALLER, CoreShare
from app.queueing.scheduler import Lane
from app.serve.channels import IS_THERE, ChannelPool, known_replicas
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
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from app.stages.threads import free_memory, replica_inference_threads
from app.telemetry.metrics import Reports
from app.telemetry.spans import current_ids, untraced
from models.ensemble import Probabilities
from models.errors import TandemError
from models.image_geometry import PictureRegion
from models.machine import give_back_memory
from models.model_set import ModelSet
from models.network import Pixels
from models.record import Precision

logger = logging.getLogger("ray.serve")
RESERVE_BYTES = 64 * 2**20  # memory that a load must leave free: requests took 30 MB under load
A = TypeVar("A")
StageHandle: TypeAlias = DeploymentHandle[Any]
TimedQuestion = tuple[Question, float]  # and its deadline by time.monotonic
hedge_budget = HedgeBudget()  # shared by all calls of this process


@dataclass(frozen=True, eq=False)
class SetStages:
    """The stages of one version of a set in this process, and the graph of all its stages."""

    model_set: ModelSet
    ensemble: Ensemble
    members: tuple[Classifier, ...]
    decoder: Decoder | None  # None: a deployment of its own; so the Combiner
    combiner: Combiner | None

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage fails or hangs."""
        for stage in (*self.members, self.decoder, self.combiner):
            if stage is not None:
                await stage.check_health()
        self.ensemble.check_health()


class StageBuilder:
    """Builds the stages of sets, one set after another; all share this process's threads.

    A stage with a handle is a deployment of its own. :meth:`build` may run on any thread, one call
    at a time. The other methods are called on the event loop, or before it runs.
    """

    def __init__(
        self,
        settings: Settings,
        decoder: StageHandle | None = None,
        members: Mapping[str, StageHandle] | None = None,
        combiner: StageHandle | None = None,
    ) -> None:
        self._settings = settings
        self._decoder, self._members, self._combiner = decoder, members, combiner
        self._threads = None if members is not None else replica_inference_threads(settings.streams)
        self.scheduler = self._threads.scheduler if self._threads is not None else None
        self._shares: dict[str, CoreShare] = {}
        self._reports: dict[tuple[str, str], Reports] = {}  # by set and member
        self._user_config: dict[str, Any] = {}
        self.joined: list[SetStages] = []
        self.members: list[Classifier] = []  # of all joined sets

    @property
    def threads_each(self) -> int:
        """Cores that a batch keeps busy."""
        return self._threads.threads_each if self._threads is not None else 1

    @property
    def cores(self) -> int:
        """Cores that the networks compute on; 1, the event loop's, where there are no networks."""
        return self._threads.cores if self._threads is not None else 1

    def build(
        self, settings: Settings, model_set: ModelSet, *, is_apart: bool = False
    ) -> SetStages:
        """Load, compile and check a set's networks by the set's ``settings``; takes seconds.

        With ``is_apart`` they get their own threads, which take turns with the shared threads.

        Raises:
            TandemError: a file or an answer is wrong; stages built so far are closed.
        """
        logger.info("serving model set %s, %s", model_set.name, settings.served_precision)
        threads = self._threads.apart() if self._threads and is_apart else self._threads
        members: dict[str, Classifier] = {}
        with ExitStack() as on_error:
            if threads is not None:
                share = self._share_of(model_set.name)
                for member in model_set.manifest.members:
                    name = member.name
                    reports = self._reports.setdefault((model_set.name, name), {})
                    members[name] = Classifier(settings, name, threads, model_set, share, reports)
                    on_error.callback(members[name].leave)
            combining = (
                RemoteCombiner(self._combiner) if self._combiner else Combiner(settings, model_set)
            )
            own_members = tuple(members.values())
            decoding = self._decoding(settings, model_set)
            sizes = self._settings.batch_sizes
            remote = {
                name: RemoteMember(handle, sizes, self._channels(handle))
                for name, handle in (self._members or {}).items()
            }
            ensemble = Ensemble(settings, model_set, decoding, remote or members, combining)
            on_error.pop_all()
        return SetStages(
            model_set,
            ensemble,
            own_members,
            decoding if isinstance(decoding, Decoder) else None,
            combining if isinstance(combining, Combiner) else None,
        )

    def check_memory(self, precision: Precision, model_set: ModelSet) -> None:
        """Raise :class:`NoMemoryError` unless a further set's networks fit into free memory."""
        sizes = len(set(self._settings.batch_sizes))
        needed = sum(model_set.memory_needed(precision, sizes).values())
        # Versions of the last revisions stay for rollbacks; after a start the plan's alone do.
        remedy = "start the service anew" if self._settings.has_versions else "unload a set"
        if (free := free_memory(with_files=True)) < needed + RESERVE_BYTES:
            raise NoMemoryError(
                f"loading {model_set.name} needs about {needed / 1e6:.0f} MB of memory, and "
                f"{RESERVE_BYTES / 1e6:.0f} for requests; {free / 1e6:.0f} MB are free. What was "
                f"served before still is: raise the memory limit, {remedy}, or set fewer "
                "batch_sizes"
            )

    def join(self, stages: SetStages) -> None:
        """Add built stages to those of this process, and apply its queue settings."""
        for member in stages.members:
            member.reconfigure(self._user_config)
        self.joined.append(stages)
        self._joined_changed()

    async def remove(self, stages: SetStages) -> None:
        """Remove stages that get no more requests, once their last batches have ended.

        Their memory is freed, unless the caller keeps the stages.
        """
        self.joined.remove(stages)
        self._joined_changed()
        await self.discard(stages)

    async def discard(self, stages: SetStages) -> None:
        """Close stages that have not joined, or have been removed."""
        for member in stages.members:
            await member.close()
        await asyncio.to_thread(give_back_memory)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change the queue settings of all members, and of those that join later.

        Raises:
            ConfigError: an unknown key or an invalid value; then nothing changes.
        """
        for member in self.members:
            member.reconfigure(user_config)
        self._user_config = user_config

    def _share_of(self, name: str) -> CoreShare:
        """Return a set's share of the cores, which all its versions have in common."""
        weights = self._settings.set_weights or {}
        return self._shares.setdefault(name, CoreShare(weights.get(name, 1.0)))

    def _joined_changed(self) -> None:
        self.members[:] = [member for stages in self.joined for member in stages.members]
        # With several sets batches do not wait: images being decoded may be another set's.
        if self._threads is not None:
            is_alone = len(self.joined) == 1
            self._threads.scheduler.share_cores_with(self.joined[0].decoder if is_alone else None)
            if is_alone:  # no version's other threads take turns with these any more
                self._threads.scheduler.num_ahead = self._threads.num

    def _decoding(self, settings: Settings, model_set: ModelSet) -> "Decoder | RemoteDecoder":
        if self._decoder is None:
            decoders: Iterable[Decoder | None] = (stages.decoder for stages in self.joined)
            queue = next((decoder.queue for decoder in decoders if decoder is not None), None)
            if self._threads is None:
                return Decoder(settings, model_set, queue)
            share, scheduler = self._share_of(model_set.name), self._threads.scheduler
            return Decoder(settings, model_set, queue, partial(scheduler.leaves_loop_time, share))
        image_bytes = model_set.manifest.inputs.num_bytes
        return RemoteDecoder(self._decoder, image_bytes, self._channels(self._decoder))

    def _channels(self, handle: StageHandle) -> ChannelPool | None:
        if not (self._settings.local_channels and IS_THERE):
            return None
        return ChannelPool(handle.app_name, handle.deployment_name)


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
