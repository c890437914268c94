"""The Classifier: one member of the ensemble, with its compiled network and its batch queue."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from app.answers import MemberAnswer
from app.errors import UPDATING, NotOfferedError, OtherSetError
from app.queueing.admission import Usage
from app.queueing.batch_queue import BacklogSize, BatchQueue
from app.queueing.fairness import CoreShare
from app.queueing.scheduler import BatchResult, ExecutedBatch, Lane, QueueReport, TimedRows, Waiting
from app.setting_values import QueueConfig
from app.settings import Settings
from app.stages.threads import (
    Health,
    InferenceThreads,
    free_memory,
    on_own_thread,
    replica_inference_threads,
)
from app.telemetry.metrics import MemberMetrics, Reports, recorded_golden_ms
from app.telemetry.spans import MemberSpans, current_parent
from models import golden
from models.ensemble import tempered
from models.errors import TandemError
from models.ledger import MEMBER_APART, member_cpu_ms
from models.model_set import ModelSet
from models.network import LoadedNetwork, Pixels, RuntimeOptions, load
from models.record import Precision

logger = logging.getLogger("ray.serve")
RESERVE_BYTES = 512 * 2**20  # memory that compiling for a backlog must leave free


class MemberCall(asyncio.Future[MemberAnswer]):
    """The future of a member's answer; cheaper than a task or a future for each image.

    Cancelling it takes its images out of the queue: they are dropped at their turn. ``spans``
    records its end if it is traced; ``usage`` counts its images while it is under way.
    """

    __slots__ = (
        "_fingerprint",
        "_has_features",
        "_num_images",
        "_num_left",
        "_spans",
        "_usage",
        "arrived",
        "entries",
        "parent",
    )

    def __init__(
        self,
        spans: MemberSpans,
        usage: Usage,
        num_images: int,
        fingerprint: str,
        *,
        has_features: bool = False,
    ) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._spans, self._usage, self._fingerprint = spans, usage, fingerprint
        self._has_features = has_features
        self._num_images = self._num_left = num_images
        self.entries: list[Waiting] = []  # its images in the queue
        self.parent = current_parent()  # the parent of its spans; None if it is not traced
        self.arrived = time.monotonic()
        usage.began(num_images)

    def image_ended(self, entry: Waiting) -> None:
        """Take the result or error of one of its images."""
        if self.done():
            return
        if entry.error is not None:
            self.fail(entry.error)
            return
        self._num_left -= 1
        if not self._num_left:
            results = [entry.result for entry in self.entries if entry.result is not None]
            self.entries = []  # they refer to this call: breaks the cycle
            self._usage.ended(self._num_images, done=True)
            if self.parent is not None:
                self._spans.answered(self.parent, results)
            self.set_result(self._answer_of(results))

    def fail(self, error: BaseException) -> None:
        self._leave(error)
        self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future if it is not done, and take its images out of the queue."""
        if not super().cancel(msg):
            return False
        self._leave(asyncio.CancelledError())
        return True

    def _leave(self, error: BaseException) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            entry.leave()
        self._usage.ended(self._num_images, done=False)
        if self.parent is not None:
            self._spans.failed(self.parent, self.arrived, error)

    def _answer_of(self, results: Sequence[BatchResult]) -> MemberAnswer:
        if len(results) == 1 and not self._has_features:  # the usual case
            row, queued_s, batch, _ = results[0]
            infer_ms, sizes = (batch.infer_s * 1e3,), (batch.size,)
            return MemberAnswer(row[None], (queued_s * 1e3,), infer_ms, sizes, self._fingerprint)
        features = [own for result in results if (own := result.features) is not None]
        return MemberAnswer(
            np.stack([result.probabilities for result in results]),
            tuple([result.queued_s * 1e3 for result in results]),
            tuple([result.batch.infer_s * 1e3 for result in results]),
            tuple([result.batch.size for result in results]),
            self._fingerprint,
            np.stack(features) if self._has_features else None,
        )


class Classifier:
    """Runs one member; its network runs on threads of its own, not on the replica's loop."""

    def __init__(
        self,
        settings: Settings,
        member: str,
        threads: InferenceThreads | None = None,
        model_set: ModelSet | None = None,
        share: CoreShare | None = None,
        reports: Reports | None = None,
    ) -> None:
        """Compile and check a member.

        Args:
            settings: precision, batch sizes and limits.
            member: its name in the manifest. With several sets, metrics and traces call it
                SET.MEMBER.
            threads: the inference threads that all members of this process share; None: new ones.
            model_set: the member's set; None: the settings'.
            share: the set's share of the cores.
            reports: the last reports of this member's queues in all versions of the set.

        Raises:
            ModelSetError: a file is missing, damaged or unsuitable.
            GoldenMismatchError: its answers differ from the golden answers.
        """
        self._name, self._max_files = member, settings.max_files
        model_set = model_set or settings.load_set()
        self._label = f"{model_set.name}.{member}" if settings.has_several_sets else member
        self._inference_threads = threads or replica_inference_threads(
            settings.streams, len(model_set.manifest.members)
        )
        self.calls_at_once = self._inference_threads.num  # for remote callers: one call per batch
        self._network = self._loaded(settings, model_set)
        self._max_batch_size = self._network.max_batch_size  # a backlog has a larger size compiled
        manifest = model_set.manifest
        self._fingerprint = model_set.fingerprint(settings.served_precision)
        self._input_shape = self._network.input_shape
        self._temperature = manifest.member(member).temperature
        self._log_network()
        size = manifest.image_of(member).input_size
        self._network.check_fits(size, manifest.num_classes)
        self._network.warm_up()
        self._check_golden(model_set, settings.served_precision)
        self._health = Health(f"batch of {member}")
        self._spans = MemberSpans(self._label)
        self._metrics = MemberMetrics(self._label, self.report, reports)
        expected_ms = MEMBER_APART * member_cpu_ms(manifest, settings.served_precision)[member]
        self.usage = Usage(self._inference_threads.cores, expected_ms)
        served = settings.served_precision if settings.backlog_batches else None
        self._queue = self._new_queue(settings.max_queued_images, model_set, served, share)

    def _new_queue(
        self,
        max_images: int,
        model_set: ModelSet,
        backlog_at: Precision | None,
        share: CoreShare | None,
    ) -> BatchQueue:
        """Return the queue; at that precision it may have batches for a backlog."""
        backlog = None
        if backlog_at:
            num_places = self.calls_at_once
            backlog = backlog_size(model_set, self._name, backlog_at, self._network, num_places)
        return BatchQueue(
            self._infer,
            self._network.batch_sizes,
            max_images,
            scheduler=self._inference_threads.scheduler,
            on_batch=self._executed,
            backlog=backlog,
            share=share,
        )

    def _loaded(self, settings: Settings, model_set: ModelSet) -> LoadedNetwork:
        options = RuntimeOptions(
            num_threads=self._inference_threads.cores,
            num_streams=self._inference_threads.num,
            batch_sizes=settings.batch_sizes,
            cache_dir=settings.compile_cache,
            float_type=model_set.manifest.float_type,
            has_features=True,
        )
        return load(model_set.network_path(self._name, settings.served_precision), options)

    def _log_network(self) -> None:
        network, sizes = self._network, ", ".join(map(str, self._network.batch_sizes))
        text = "%s runs on %s %s: %d threads, batches of %s, %.0f MB"
        runtime = network.runtime, network.version, network.num_threads
        logger.info(text, self._label, *runtime, sizes, network.memory_bytes / 1e6)

    def _check_golden(self, model_set: ModelSet, served: Precision) -> None:
        """Raise unless answers here match the golden answers, recorded where the set was made."""
        if (expected := model_set.golden) is None:
            logger.warning("%s has no golden answers: its answers are not checked", self._label)
            return
        precision = model_set.manifest.member(self._name).precision_of(served)
        check = partial(golden.check, expected, self._name, precision, self._network)
        taken_ms = recorded_golden_ms(self._label, check)
        logger.info("golden check of %s passed in %.0f ms", self._label, taken_ms)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change queue settings while running; Serve calls this when ``user_config`` changes.

        Raises :class:`ConfigError` if a key is unknown or a value invalid; then nothing changes.
        """
        changed = QueueConfig.of(user_config or {}, self._max_files)
        if changed.max_queued_images is not None:
            self._queue.max_queued = changed.max_queued_images
        if changed.max_batch_size is not None:
            self._queue.max_batch_size = min(changed.max_batch_size, self._max_batch_size)

    def leave(self) -> list[asyncio.Task[None]]:
        """Leave the scheduler, and return the running batches; no calls may follow."""
        self._metrics.close()
        return self._queue.leave()

    async def close(self) -> None:
        """Free the network, once its last batch has ended; no calls may follow."""
        if running := self.leave():
            await asyncio.wait(running)
        del self._network  # at once: the queue and this object form a cycle, collected later

    def report(self) -> QueueReport:
        return self._queue.report()

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if batches fail or hang; Serve then replaces this."""
        self._health.check()

    def classify(
        self,
        images: Pixels,
        left_s: float,
        lane: Lane = "interactive",
        *,
        has_features: bool = False,
    ) -> MemberCall:
        """Queue images, uint8 (K, H, W, 3) BGR, each by itself; return the future of their answer.

        ``has_features``: the answer has their pooled features too. Cancelling the future takes the
        images out of the queue. It raises:
            NotOfferedError: the network has no pooled features.
            OverloadedError: the queue is full.
            DeadlineError: ``left_s`` passed before every image had been started.
            OtherSetError: the images have the input size of another model set.
        """
        call = MemberCall(
            self._spans, self.usage, len(images), self._fingerprint, has_features=has_features
        )
        if has_features and (why := self._network.no_features) is not None:
            message = f"embedding of {self._name} is asked for, and it has none: {why}"
            call.fail(NotOfferedError(message))
            return call
        if images.shape[1:] != self._input_shape:
            message = f"{self._name} is of another model set than the Gateway: {UPDATING}"
            call.fail(OtherSetError(message))
            return call
        try:
            call.entries = self._queue.submit(images, call, left_s, lane)
        except TandemError as error:
            call.fail(error)
        return call

    def _executed(self, batch: ExecutedBatch) -> None:
        self._metrics.executed(batch)
        self._spans.executed(batch)

    async def _infer(self, batch: Sequence[Pixels]) -> TimedRows:
        with self._health.run():
            return await self._inference_threads.run(self._predict, batch)

    def _predict(self, batch: Sequence[Pixels]) -> TimedRows:
        """Run a batch; called on a thread, for which the batch may have waited."""
        started = time.monotonic()
        rows, features = self._network.predict_all(batch)
        rows = tempered(rows, self._temperature)
        return TimedRows(rows, started, time.monotonic(), features)


def backlog_size(
    model_set: ModelSet, member: str, served: Precision, network: LoadedNetwork, num_places: int
) -> BacklogSize | None:
    """Return a member's larger batch size for a backlog; None if its network has a fixed one.

    ``num_places`` is how many of its batches run at a time.
    """
    if network.fixed_batch:
        return None
    usual = network.max_batch_size

    def add() -> None:
        needed = network.memory_bytes + RESERVE_BYTES
        if (free := free_memory()) < needed:
            raise MemoryError(f"{free / 1e6:.0f} MB are free, it takes up to {needed / 1e6:.0f}")
        # The file is read again, and its hash must be the same.
        model_set.network_path(member, served)
        network.add_batch_size(2 * usual)
        if (expected := model_set.golden) is None:
            return
        precision = model_set.manifest.member(member).precision_of(served)
        try:
            golden.check(expected, member, precision, network)  # in batches of the larger size
        except Exception:
            network.remove_batch_size(2 * usual)
            raise

    return BacklogSize(member, usual, num_places, partial(on_own_thread, "compile", add))
