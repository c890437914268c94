"""The operator's own functions, settings ``preprocess`` and ``combine``: their import and calls.

A name is ``package.module:function`` and comes from the operator's configuration only; nothing that
a client sends is imported. A function is tried on generated input before the service starts. It is
called on several threads at a time, with read-only arrays, and returns a new one. If it raises, or
its result does not fit, only the request that it was called for fails (500, code ``function``).
"""

import asyncio
import hashlib
import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
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

SUM_TOLERANCE = 1e-3  # of a row's sum; the float32 sum of 1,000 classes is off by a hundredth of it
# A class that eight members score 0.99 keeps a higher product than this.
SURELY_THERE = 0.6
T = TypeVar("T")
logger = logging.getLogger("ray.serve")
Stage = Literal["preprocess", "combine"]
NUM_ARGUMENTS: dict[Stage, int] = {"preprocess": 1, "combine": 2}
SIGNATURES = "app/stages/own_functions.py has the signatures"
# By module, and names of modules.
_DIGESTS: WeakKeyDictionary[ModuleType, dict[tuple[str, str], str]] = WeakKeyDictionary()
MAX_VIEWS = 8  # each costs an inference of every member
SEED = 17
NUM_IMAGES = (1, 3)  # in each call: a function must accept any number
A = TypeVar("A", bound=npt.NDArray[np.generic])


class WrongAnswerError(ValueError):
    """A function's result does not fit its signature; the message says why."""


def as_pixels(
    answer: object, shape: tuple[int, ...], num_views: int | None = None
) -> tuple[Pixels, int]:
    """Check the result of ``preprocess``; return uint8 (V * N, H, W, 3), contiguous, and V.

    ``shape`` is that of the function's argument, (N, H, W, 3). ``num_views`` is the required number
    of views per image, V; None: any number from 1 to ``MAX_VIEWS``.
    """
    num_images, *rest = shape
    views = f"{num_views} * {num_images}" if num_views else f"V * {num_images}"
    wanted = f"uint8 ({views}, {', '.join(map(str, rest))})"
    if not isinstance(answer, np.ndarray) or answer.dtype != np.uint8:
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    per_image, left = divmod(len(answer), num_images) if answer.ndim == len(shape) else (0, 0)
    fits = per_image and not left and list(answer.shape[1:]) == rest
    if not fits or (num_views is not None and per_image != num_views):
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    if per_image > MAX_VIEWS:
        raise WrongAnswerError(f"{per_image} views of each image; the limit is {MAX_VIEWS}")
    return np.ascontiguousarray(answer), per_image


def as_rows(
    answer: object, shape: tuple[int, int], *, is_multi_label: bool = False
) -> Probabilities:
    """Check the result of ``combine``: float32 (N, C) of ``shape``, each row a distribution.

    In a multi-label set each value is an independent score, 0 to 1.
    """
    wanted = f"float32 {shape}"
    if not isinstance(answer, np.ndarray) or (answer.dtype, answer.shape) != (np.float32, shape):
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
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


def _described(answer: object) -> str:
    if isinstance(answer, np.ndarray):
        return f"{answer.dtype} {answer.shape}"
    return "None" if answer is None else f"a {type(answer).__name__}"


@dataclass(frozen=True)
class OwnFunction:
    """An imported function of the operator."""

    stage: Stage
    name: str  # as in the settings
    call: Callable[..., Any]
    digest: str  # of its source files

    @property
    def identity(self) -> str:
        """A hash that differs between functions, and changes with a function's source."""
        return f"{self.stage}={self.name}@{self.digest}"


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


def load_function(name: str | None, stage: Stage) -> OwnFunction | None:
    """Import the function of a stage, MODULE:FUNCTION; None without a name.

    Raises :class:`ConfigError` if it cannot be imported, or does not accept the stage's arguments.
    """
    if name is None:
        return None
    module_name, _, attribute = name.partition(":")
    module = _imported(stage, name, module_name)
    if (function := getattr(module, attribute, None)) is None:
        raise ConfigError(f"{stage}: {name}: module {module_name} has no {attribute}")
    _check_callable(stage, name, function)
    return OwnFunction(stage, name, function, _digest(module_name, function))


def identities(settings: Settings) -> tuple[str, ...]:
    """Return the identities of the settings' functions; () if there are none."""
    functions = (load_function(getattr(settings, stage), stage) for stage in NUM_ARGUMENTS)
    return tuple(function.identity for function in functions if function is not None)


def fingerprint_with(fingerprint: str, combine: OwnFunction | None) -> str:
    """Return the fingerprint of answers that a Combiner with this function gives.

    ``fingerprint`` is the model set's; it stays the same without a function.
    """
    if combine is None:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}\n{combine.identity}".encode()).hexdigest()[:12]


def _imported(stage: Stage, name: str, module: str) -> object:
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{stage}: {name}: importing it raised {error!r}") from error
        raise ConfigError(
            f"{stage}: {name}: there is no module {error.name}; install it, or put its folder on "
            "PYTHONPATH, on every node and before Ray starts"
        ) from error
    except BaseException as error:  # SystemExit included, which must not end this program
        raise ConfigError(f"{stage}: {name}: importing it raised {error!r}") from error


def _check_callable(stage: Stage, name: str, function: object) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"{stage}: {name} is no function but a {kind}; {SIGNATURES}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{stage}: {name} is asynchronous: give a plain function; {SIGNATURES}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions in C have no signature: the trial call decides
        return
    try:
        signature.bind(*range(NUM_ARGUMENTS[stage]))
    except TypeError as error:
        number = NUM_ARGUMENTS[stage]
        raise ConfigError(
            f"{stage}: {name}{signature} cannot be called with {number} positional "
            f"argument{'s' * (number > 1)} ({error}); {SIGNATURES}"
        ) from error


def _digest(module_name: str, function: object) -> str:
    """Return the hash of the files from which the function was imported, and of their packages.

    Edits after import have no effect. Modules that these import from elsewhere are not included.
    """
    names = (module_name, getattr(function, "__module__", None) or module_name)
    digests = _DIGESTS.setdefault(sys.modules[module_name], {})
    if names in digests:
        return digests[names]
    files = set[Path]()
    for module in map(sys.modules.get, names):
        path = Path(getattr(module, "__file__", None) or "")
        if path.is_file():
            files |= {path, *(path.parent.glob("*.py") if module and module.__package__ else ())}
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    digests[names] = hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()[:16]
    return digests[names]


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
        if (function := load_function(settings.preprocess, "preprocess")) is None:
            return None
        num_views = try_preprocess(
            function, manifest, settings.max_files, settings.max_queued_images
        )
        calls = FunctionCalls(function, settings.decode_threads)
        return cls(calls, num_views, manifest.inputs)

    async def views(self, images: Pixels) -> Pixels:
        """Return the views of uint8 (N, H, W, 3): (N, V, H, W, 3), or (N, H, W, 3) with one view.

        If members have different inputs, (N, B), the function is called for each distinct input,
        and the views are (N, V, B) or (N, B).
        """
        parts = self._inputs.split(images)
        calls = [self.calls.call(partial(self._grouped, p.shape), read_only(p)) for p in parts]
        return self._inputs.joined(await asyncio.gather(*calls))

    def _grouped(self, shape: tuple[int, ...], answer: object) -> Pixels:
        pixels, num_views = as_pixels(answer, shape, self.num_views)
        if num_views == 1:
            return pixels
        by_view = pixels.reshape(num_views, *shape)  # (V, N, H, W, 3)
        return by_view.swapaxes(0, 1).copy()


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


def try_preprocess(
    function: OwnFunction, manifest: Manifest, max_files: int, max_queued: int
) -> int:
    """Call the function on generated pixels; return its number of views per image.

    Raises:
        ConfigError: see :func:`check_functions`; or the members' queues are too short for the
            views.
    """
    views: int | None = None
    shapes = sorted({rule.shape for rule in manifest.inputs.rules})
    for num_images, sides in product(NUM_IMAGES, shapes):
        shape = (num_images, *sides)
        images = np.random.default_rng(SEED).integers(0, 256, shape, np.uint8)
        with _failures_named(function, f"uint8 {images.shape}"):
            _, views = as_pixels(function.call(read_only(images)), images.shape, views)
    assert views is not None
    try:
        check_form_fits(max_queued, max_files * views)
    except ValueError as error:
        raise ConfigError(f"preprocess: {views} views of each file: {error}") from error
    return views


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
        with _failures_named(function, f"float32 {shape} of {', '.join(names)}"):
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


def read_only(array: A) -> A:
    """Return a read-only view of the array."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _drawn(shape: tuple[int, int], seed: int, *, is_multi_label: bool) -> Probabilities:
    """Return rows that sum to one; of a multi-label set scores of 0.99 or more for every label."""
    drawn: Probabilities = np.random.default_rng((SEED, seed)).random(shape, np.float32)
    if is_multi_label:
        return np.asarray(np.float32(0.99) + np.float32(0.009) * drawn)
    drawn += np.float32(1e-3)
    return np.asarray(drawn / drawn.sum(axis=1, keepdims=True))


@contextmanager
def _failures_named(function: OwnFunction, tried_on: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included
        is_wrong = isinstance(error, WrongAnswerError)
        what = f"returned {error}" if is_wrong else f"raised {type(error).__name__}: {error}"
        raise ConfigError(
            f"{function.stage}: {function.name}, tried on {tried_on}, {what}; mend it, or leave "
            f"{function.stage} out ({SIGNATURES})"
        ) from error
