"""The operator's own functions, settings ``preprocess`` and ``combine``: their import and calls.

A name is ``package.module:function`` and comes from the operator's configuration only; nothing that
a client sends is imported. A function is tried on generated input before the service starts. It is
called on several threads at a time, with read-only arrays, and returns a new one. If it raises, or
its result does not fit, only the request that it was called for fails (500, code ``function``).
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from opentelemetry.trace import SpanContext

from app.errors import ConfigError, FunctionError
from app.setting_values import check_form_fits
from app.settings import AnswerPolicy, Settings
from app.stages.threads import Health
from app.telemetry.metric_table import FAILED_FUNCTIONS
from app.telemetry.metrics import meter
from app.telemetry.spans import current_parent, record
from models.ensemble import Probabilities
from models.image import ImageInputs
from models.manifest import Manifest
from models.network import Pixels
from models.own_functions import (
    NUM_IMAGES,
    SEED,
    OwnFunction,
    WrongAnswerError,
    described,
    failures_named,
    function_of_set,
    grouped,
    load_function,
    read_only,
    tried_views,
)

SUM_TOLERANCE = 1e-3  # of a row's sum; the float32 sum of 1,000 classes is off by a hundredth of it
# A class that eight members score 0.99 keeps a higher product than this.
SURELY_THERE = 0.6
T = TypeVar("T")
logger = logging.getLogger("ray.serve")


def as_rows(
    answer: object, shape: tuple[int, int], *, is_multi_label: bool = False
) -> Probabilities:
    """Check the result of ``combine``: float32 (N, C) of ``shape``, each row a distribution.

    In a multi-label set each value is an independent score, 0 to 1.
    """
    wanted = f"float32 {shape}"
    if not isinstance(answer, np.ndarray) or (answer.dtype, answer.shape) != (np.float32, shape):
        raise WrongAnswerError(f"{described(answer)}, not {wanted}")
    rows: Probabilities = np.ascontiguousarray(answer)
    if not np.isfinite(rows).all():
        raise WrongAnswerError("NaN or infinity among the probabilities")
    low, high = float(rows.min()), float(rows.max())
    if low < 0 or high > 1 + SUM_TOLERANCE:
        raise WrongAnswerError(f"probabilities from {low:g} to {high:g}, not from 0 to 1")
    if is_multi_label:
        return rows
    off = np.abs(rows.sum(axis=1, dtype=np.float64) - 1)
    if off.max() > SUM_TOLERANCE:
        total = float(rows[int(off.argmax())].sum())
        raise WrongAnswerError(f"a row that sums to {total:g}, not to 1")
    return rows


class FunctionCalls:
    """The calls of the operator's function in this process, ``num_threads`` at a time."""

    def __init__(self, function: OwnFunction, num_threads: int) -> None:
        self.function = function
        self._threads = ThreadPoolExecutor(num_threads, f"tandem-{function.stage}")
        self._health = Health(f"call of {function.name}", counts_failures=False)

    def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call hangs."""
        self._health.check()

    async def call(self, check: Callable[[object], T], *arguments: object) -> T:
        """Call the function with ``arguments``; return its result after ``check``.

        Raises:
            FunctionError: the function raised, or ``check`` raised :class:`WrongAnswerError`.
        """
        parent, loop = current_parent(), asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, parent, check, arguments)

    def _run(
        self,
        parent: SpanContext | None,
        check: Callable[[object], T],
        arguments: tuple[object, ...],
    ) -> T:
        started, error = time.monotonic(), None
        try:
            with self._health.run():
                return check(self.function.call(*arguments))
        except BaseException as raised:  # SystemExit included, which would end the event loop
            error = f"{type(raised).__name__}: {raised}"
            raise self._logged(raised) from raised
        finally:
            if parent is not None:
                facts = {"tandem.stage": self.function.stage, "tandem.function": self.function.name}
                record("function", parent, started, time.monotonic(), facts, error=error)

    def _logged(self, raised: BaseException) -> FunctionError:
        stage, name = self.function.stage, self.function.name
        logger.error("%s (%s) failed", stage, name, exc_info=raised)
        meter.count(FAILED_FUNCTIONS, stage=stage)
        kind = type(raised).__name__
        what = f"returned {raised}" if isinstance(raised, WrongAnswerError) else f"raised {kind}"
        return FunctionError(
            f"{stage} ({name}), a function of this service's operator, {what}; its log has the "
            "details. Another image may be answered"
        )


def preprocess_of(
    name: str | None, allowed: Sequence[str], manifest: Manifest
) -> OwnFunction | None:
    """Return the function between Decoder and members: ``name``, the setting, or the set's own.

    Raises :class:`ConfigError` if there are both, or the set's is not among those ``allowed``.
    """
    if name is None:
        return function_of_set(manifest, allowed)
    if manifest.preprocess is not None:
        raise ConfigError(
            f"preprocess is {name}, and model set {manifest.name} has its own, "
            f"{manifest.preprocess}: leave the setting out"
        )
    return load_function(name, "preprocess")


def identities(settings: Settings, manifest: Manifest) -> tuple[str, ...]:
    """Return the identities of the functions of settings and set; () if there are none."""
    preprocess = preprocess_of(settings.preprocess, settings.set_functions, manifest)
    functions = (preprocess, load_function(settings.combine, "combine"))
    return tuple(function.identity for function in functions if function is not None)


def fingerprint_with(fingerprint: str, combine: OwnFunction | None) -> str:
    """Return the fingerprint of answers that a Combiner with this function gives.

    ``fingerprint`` is the model set's; it stays the same without a function.
    """
    if combine is None:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}\n{combine.identity}".encode()).hexdigest()[:12]


class Preprocess(Protocol):
    """The signature of ``preprocess``: maps pixels to pixels, between Decoder and members."""

    def __call__(self, images: Pixels, /) -> Pixels:
        """Return the images that the members get.

        Args:
            images: uint8 (N, H, W, 3) at the set's input size, in its colour order (BGR). N is at
                least 1 and varies. If members have different inputs, each distinct input gets a
                call.

        Returns:
            uint8 (V * N, H, W, 3) with the same H and W: V views of each image, 1 to 8, the same
                number in every call. Row ``v * N + i`` is view v of image i, the order of
                ``np.concatenate([images, mirrored])``. Each member runs on every view. The mean of
                an image's V rows is the member's result, for the fast plan and the combiner too.
        """


class Combine(Protocol):
    """The signature of ``combine``: maps the members' rows to the ensemble's row."""

    def __call__(
        self, members: Mapping[str, Probabilities], weights: Mapping[str, float], /
    ) -> Probabilities:
        """Return the ensemble's probabilities.

        Args:
            members: float32 (N, C) probabilities by member, for the members that answered, in the
                manifest's order. With ``answer_policy`` ``quorum`` or ``any`` some may be missing.
            weights: the manifest's weights of these members, scaled to sum to one.

        Returns:
            float32 (N, C), finite, each value 0 to 1, each row summing to one (within 0.001). In a
                multi-label set values are independent scores, and rows need not sum to one. A
                function that gives a low score to a class that all members score highly is refused
                at the start.
        """


class OwnPreprocess:
    """The setting ``preprocess``: makes the members' views of each image."""

    def __init__(self, calls: FunctionCalls, num_views: int, inputs: ImageInputs) -> None:
        self.calls, self.num_views, self._inputs = calls, num_views, inputs

    @classmethod
    def of(cls, settings: Settings, manifest: Manifest) -> "OwnPreprocess | None":
        """Load and try the function; None without one; raises :class:`ConfigError` if it fails."""
        name, allowed = settings.preprocess, settings.set_functions
        if (function := preprocess_of(name, allowed, manifest)) is None:
            return None
        num_views = tried_views(function, manifest.inputs)
        check_views_fit(num_views, settings.max_files, settings.max_queued_images)
        calls = FunctionCalls(function, settings.decode_threads)
        return cls(calls, num_views, manifest.inputs)

    async def views(self, images: Pixels) -> Pixels:
        """Return the views of uint8 (N, H, W, 3): (N, V, H, W, 3), or (N, H, W, 3) with one view.

        If members have different inputs, (N, B), the function is called for each distinct input,
        and the views are (N, V, B) or (N, B).
        """
        parts = self._inputs.split(images)
        calls = [
            self.calls.call(partial(grouped, shape=p.shape, num_views=self.num_views), read_only(p))
            for p in parts
        ]
        return self._inputs.joined(await asyncio.gather(*calls))


class OwnCombine:
    """The setting ``combine``: computes the ensemble's rows, in place of the average."""

    def __init__(
        self, calls: FunctionCalls, weights: Mapping[str, float], *, is_multi_label: bool = False
    ) -> None:
        self.calls, self._weights, self._is_multi_label = calls, weights, is_multi_label

    @classmethod
    def of(cls, settings: Settings, manifest: Manifest) -> "OwnCombine | None":
        """Load and try the function; None without one; raises :class:`ConfigError` if it fails."""
        if (function := load_function(settings.combine, "combine")) is None:
            return None
        try_combine(function, manifest, settings.answer_policy)
        calls = FunctionCalls(function, settings.decode_threads)
        return cls(calls, manifest.weights, is_multi_label=manifest.is_multi_label)

    async def rows(self, members: Mapping[str, Probabilities]) -> Probabilities:
        """Return the ensemble's float32 (N, C) from the rows of the members that answered."""
        names = [name for name in self._weights if name in members]
        read = {name: read_only(members[name]) for name in names}
        num_images, num_classes = read[names[0]].shape
        shape = (num_images, num_classes)
        check = partial(as_rows, shape=shape, is_multi_label=self._is_multi_label)
        return await self.calls.call(check, read, scaled(self._weights, names))


def check_functions(settings: Settings, manifest: Manifest) -> None:
    """Import and try the functions that the settings name.

    Raises :class:`ConfigError` if a function cannot be imported, does not fit its signature,
    raises, or returns a wrong result.
    """
    OwnPreprocess.of(settings, manifest)
    OwnCombine.of(settings, manifest)


def check_views_fit(num_views: int, max_files: int, max_queued: int) -> None:
    """Raise :class:`ConfigError` if the members' queues are too short for a request's views."""
    try:
        check_form_fits(max_queued, max_files * num_views)
    except ValueError as error:
        raise ConfigError(f"preprocess: {num_views} views of each file: {error}") from error


def try_combine(function: OwnFunction, manifest: Manifest, policy: AnswerPolicy) -> None:
    """Call the function on rows of all members, and of the fewest that the answer policy allows."""
    weights, is_multi_label = manifest.weights, manifest.is_multi_label
    trials = [(num_images, list(weights)) for num_images in NUM_IMAGES]
    if policy != "all":  # a single member may answer
        trials.append((1, list(weights)[:1]))
    for num_images, names in trials:
        shape = (num_images, manifest.num_classes)
        draw = partial(_drawn, shape, is_multi_label=is_multi_label)
        members = {name: read_only(draw(seed)) for seed, name in enumerate(names)}
        with failures_named(function, f"float32 {shape} of {', '.join(names)}"):
            answer = function.call(members, scaled(weights, names))
            rows = as_rows(answer, shape, is_multi_label=is_multi_label)
            if is_multi_label and (low := float(rows.min())) < SURELY_THERE:
                raise WrongAnswerError(
                    f"{low:.3g} for a class that every member scores 0.99 or more: this set is "
                    "multi-label, and a function that shares one among the classes, or picks one, "
                    "is none for it"
                )


def scaled(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return these members' weights, summing to one."""
    total = sum(weights[name] for name in names)
    return {name: weights[name] / total for name in names}


def _drawn(shape: tuple[int, int], seed: int, *, is_multi_label: bool) -> Probabilities:
    """Return rows that sum to one; of a multi-label set scores of 0.99 or more for every label."""
    drawn: Probabilities = np.random.default_rng((SEED, seed)).random(shape, np.float32)
    if is_multi_label:
        return np.asarray(np.float32(0.99) + np.float32(0.009) * drawn)
    drawn += np.float32(1e-3)
    return np.asarray(drawn / drawn.sum(axis=1, keepdims=True))
