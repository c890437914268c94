"""The Classifier: one member of the ensemble, one compiled network, one batch queue."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from app.compute.group_limits import free_memory
from app.compute.health import Health
from app.compute.inference_threads import InferenceThreads, replica_inference_threads
from app.deployments.member_call import MemberCall, MemberObserver
from app.errors import UPDATING, ConfigError, OtherSetError
from app.messages import MemberAnswer
from app.metrics.member import golden_recorded
from app.queueing.backlog_size import BacklogSize
from app.queueing.batch_queue import BatchQueue
from app.queueing.batch_records import QueueReport, TimedRows
from app.queueing.priority import Lane
from app.scaling.costs import MEMBER_APART, member_cpu_ms
from app.scaling.usage import Usage
from app.setting_values import QueueConfig, check_form_fits
from app.settings import Settings
from models import golden
from models.ensemble import tempered
from models.errors import TandemError
from models.model_set import ModelSet
from models.runtimes.interface import LoadedNetwork
from models.runtimes.load import load
from models.runtimes.options import Pixels, RuntimeOptions

logger = logging.getLogger("ray.serve")

LAST_BATCH_SHARE = 0.05  # of the moving average of an image's time
RESERVE_BYTES = 512 * 2**20  # left to everything else where a network is compiled for a backlog


class Classifier:
    """Runs one member; the network works on threads of its own, off the replica's loop."""

    def __init__(
        self,
        settings: Settings,
        member: str,
        threads: InferenceThreads | None = None,
        model_set: ModelSet | None = None,
    ) -> None:
        """Compile and check a member, by its name in the manifest.

        ``threads`` are those that all members of this process share; None makes some.

        Raises:
            ModelSetError, GoldenMismatchError: its files or its answers are not what they must be.

        """
        self._name, self._max_files = member, settings.max_files
        model_set = model_set or settings.load_set()
        self._inference_threads = threads or replica_inference_threads(
            settings, len(model_set.manifest.members)
        )
        self.calls_at_once = self._inference_threads.num  # of a remote caller: a batch is a call
        self._network = self._loaded(settings, model_set)
        manifest = model_set.manifest
        self._fingerprint = model_set.fingerprint(settings.served_precision)
        self._input_size = manifest.image_of(member).input_size
        self._temperature = manifest.member(member).temperature
        self._log_network()
        self._network.check_fits(self._input_size, manifest.num_classes)
        self._network.warm_up()
        self._check_golden(model_set, member, settings)
        self._health = Health(f"batch of {member}")
        self._image_s = 0.0  # that an image takes a thread, by the last batches
        self._observer = MemberObserver(member, self.report)
        expected_ms = MEMBER_APART * member_cpu_ms(manifest, settings.served_precision)[member]
        self.usage = Usage(self._inference_threads.cores, expected_ms)
        self._queue = BatchQueue(
            self._infer,
            self._network.batch_sizes,
            settings.max_queued_images,
            scheduler=self._inference_threads.scheduler,
            on_batch=self._observer.executed,
            backlog=backlog_size(settings, model_set, member, self._network, self.calls_at_once),
        )

    def _loaded(self, settings: Settings, model_set: ModelSet) -> LoadedNetwork:
        options = RuntimeOptions(
            num_threads=self._inference_threads.cores,
            num_streams=self._inference_threads.num,
            batch_sizes=settings.batch_sizes,
            cache_dir=settings.compile_cache,
            float_type=model_set.manifest.float_type,
        )
        return load(model_set.network_path(self._name, settings.served_precision), options)

    def _log_network(self) -> None:
        network = self._network
        logger.info(
            "%s runs on %s %s: %d threads, batches of %s, %.0f MB",
            self._name,
            network.runtime,
            network.version,
            network.num_threads,
            ", ".join(map(str, network.batch_sizes)),
            network.memory_bytes / 1e6,
        )

    def _check_golden(self, model_set: ModelSet, member: str, settings: Settings) -> None:
        """Refuse to serve answers that differ from those where the set was made."""
        if (expected := model_set.golden) is None:
            logger.warning("%s has no golden answers: what it answers is not checked", member)
            return
        started = time.perf_counter()
        precision = model_set.manifest.member(member).precision_of(settings.served_precision)
        with golden_recorded(member):
            golden.check(expected, member, precision, self._network)
        taken_ms = (time.perf_counter() - started) * 1e3
        logger.info("golden check of %s passed in %.0f ms", member, taken_ms)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new queue settings while running; Serve calls this when ``user_config`` changes.

        Raises:
            ConfigError: a key or value that is none; the settings stay as they were.

        """
        try:
            changed = QueueConfig.model_validate(user_config or {})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"user_config: {where}: {first['msg']}") from error
        if changed.max_queued_images is not None:
            try:
                check_form_fits(changed.max_queued_images, self._max_files)
            except ValueError as error:
                raise ConfigError(f"user_config: {error}") from error
            self._queue.max_queued = changed.max_queued_images
        if changed.max_batch_size is not None:
            self._queue.max_batch_size = min(changed.max_batch_size, self._network.max_batch_size)

    @property
    def is_idle(self) -> bool:
        """Whether no image waits or is computed."""
        return not self.usage.num_under_way

    @property
    def has_backlog(self) -> bool:
        """Whether enough images wait to fill a batch on every core."""
        return len(self._queue) >= self._inference_threads.cores * self._queue.max_batch_size

    @property
    def images_per_s(self) -> float:
        """How many it answers at most, by its last batches; 0 before the first."""
        return self._inference_threads.num / self._image_s if self._image_s else 0.0

    def report(self) -> QueueReport:
        return self._queue.report()

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if batches fail, or one does not end: Serve replaces it."""
        self._health.check()

    async def classify(
        self, images: Pixels, left_s: float, lane: Lane = "interactive"
    ) -> MemberAnswer:
        """Return the probabilities of uint8 (K, H, W, 3); each image joins the queue by itself.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: ``left_s`` passed before every image had its turn.
            OtherSetError: the images are of another model set's size.

        """
        return await self.begin(images, left_s, lane)

    def begin(
        self, images: Pixels, left_s: float, lane: Lane = "interactive"
    ) -> asyncio.Future[MemberAnswer]:
        """Queue images and return the future of :meth:`classify`'s answer, or of its error.

        To cancel the future is to leave the queue.
        """
        call = MemberCall(self._observer, self.usage, len(images), self._fingerprint)
        if images.shape[1] != self._input_size:
            message = f"{self._name} is of another model set than the Gateway: {UPDATING}"
            call.fail(OtherSetError(message))
            return call
        try:
            call.entries = self._queue.submit(images, call, left_s, lane)
        except TandemError as error:
            call.fail(error)
        return call

    async def _infer(self, batch: Sequence[Pixels]) -> TimedRows:
        with self._health.run():
            timed = await self._inference_threads.run(self._predict, batch)
        taken_s = (timed.ended - timed.started) / len(batch)
        before = self._image_s or taken_s
        self._image_s = before + LAST_BATCH_SHARE * (taken_s - before)
        return timed

    def _predict(self, batch: Sequence[Pixels]) -> TimedRows:
        """Run on a thread, which the batch may have waited for."""
        started = time.monotonic()
        rows = tempered(self._network.predict(batch), self._temperature)
        return TimedRows(rows, started, time.monotonic())


def backlog_size(
    settings: Settings, model_set: ModelSet, member: str, network: LoadedNetwork, num_places: int
) -> BacklogSize | None:
    """Return the size for a member whose batches have ``num_places``; None: it gets none."""
    if not settings.backlog_batches or network.fixed_batch:
        return None
    usual = network.max_batch_size

    def add() -> None:
        needed = network.memory_bytes + RESERVE_BYTES
        if (free := free_memory()) < needed:
            raise MemoryError(f"{free / 1e6:.0f} MB are free, it takes up to {needed / 1e6:.0f}")
        # It is read anew: as it was, or not at all.
        model_set.network_path(member, settings.served_precision)
        network.add_batch_size(2 * usual)
        if (expected := model_set.golden) is None:
            return
        precision = model_set.manifest.member(member).precision_of(settings.served_precision)
        try:
            golden.check(expected, member, precision, network)  # in batches of that size
        except Exception:
            network.remove_batch_size(2 * usual)
            raise

    async def prepare() -> None:
        # A thread of its own: what it used of the network goes with it.
        thread = ThreadPoolExecutor(1, "compile")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, add)
        finally:
            thread.shutdown(wait=False)

    return BacklogSize(member, usual, num_places, prepare)
