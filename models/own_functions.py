"""The operator's own functions: their import, the checks of their results, and those of sets.

A name is ``package.module:function``. A function runs with the rights of who calls it, so a set
that names one is no permission: its name must be allowed by the setting ``set_functions``, which is
the variable TANDEM_SET_FUNCTIONS for commands. Nothing that a client sends is imported.
"""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from models.ensemble import Probabilities
from models.errors import ConfigError
from models.image import ImageInputs, ImageRule
from models.manifest import Manifest
from models.network import LoadedNetwork, Outputs, Pixels

Stage = Literal["preprocess", "combine"]
NUM_ARGUMENTS: dict[Stage, int] = {"preprocess": 1, "combine": 2}
SIGNATURES = "app/stages/own_functions.py has the signatures"
ALLOWED_VARIABLE = "TANDEM_SET_FUNCTIONS"  # the setting's, which holds without a service too
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
        raise WrongAnswerError(f"{described(answer)}, not {wanted}")
    per_image, left = divmod(len(answer), num_images) if answer.ndim == len(shape) else (0, 0)
    fits = per_image and not left and list(answer.shape[1:]) == rest
    if not fits or (num_views is not None and per_image != num_views):
        raise WrongAnswerError(f"{described(answer)}, not {wanted}")
    if per_image > MAX_VIEWS:
        raise WrongAnswerError(f"{per_image} views of each image; the limit is {MAX_VIEWS}")
    return np.ascontiguousarray(answer), per_image


def grouped(answer: object, shape: tuple[int, ...], num_views: int) -> Pixels:
    """Check the result of ``preprocess``; return (N, V, H, W, 3), or (N, H, W, 3) with one view."""
    pixels, _ = as_pixels(answer, shape, num_views)
    if num_views == 1:
        return pixels
    by_view = pixels.reshape(num_views, *shape)  # (V, N, H, W, 3)
    return by_view.swapaxes(0, 1).copy()


def described(answer: object) -> str:
    """Return a wrong result's type and shape, for messages."""
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


def read_only(array: A) -> A:
    """Return a read-only view of the array."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


@contextmanager
def failures_named(function: OwnFunction, tried_on: str) -> Iterator[None]:
    """Raise what a call raises as :class:`ConfigError` that names function and argument."""
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


def tried_views(function: OwnFunction, inputs: ImageInputs) -> int:
    """Call ``preprocess`` on generated pixels; return its number of views per image.

    Raises :class:`ConfigError` if it raises, or its result does not fit.
    """
    views: int | None = None
    shapes = sorted({rule.shape for rule in inputs.rules})
    for num_images, sides in product(NUM_IMAGES, shapes):
        images = np.random.default_rng(SEED).integers(0, 256, (num_images, *sides), np.uint8)
        with failures_named(function, f"uint8 {images.shape}"):
            _, views = as_pixels(function.call(read_only(images)), images.shape, views)
    assert views is not None
    return views


def function_of_set(manifest: Manifest, allowed: Sequence[str]) -> OwnFunction | None:
    """Import the set's own ``preprocess``; None if it has none.

    Raises :class:`ConfigError` if its name is not among those ``allowed``, or it cannot be used.
    """
    if (name := manifest.preprocess) is None:
        return None
    if name not in allowed:
        raise ConfigError(
            f"model set {manifest.name} names preprocess {name}, code that would run with your "
            f"rights: if you know whose it is, allow it with {ALLOWED_VARIABLE}={name} (for a "
            "service also the setting set_functions)"
        )
    return load_function(name, "preprocess")


class OwnInputs(ImageInputs):
    """The inputs of a set that has its own ``preprocess``, for who runs it without a service."""

    def __init__(self, rules: Mapping[str, ImageRule], function: OwnFunction) -> None:
        super().__init__(rules)
        self._function = function
        self._num_views = tried_views(function, self)

    def views(self, images: Pixels) -> Pixels:
        return self.joined([self._views(part) for part in self.split(images)])

    def _views(self, images: Pixels) -> Pixels:
        with failures_named(self._function, f"uint8 {images.shape}"):
            answer = self._function.call(read_only(images))
            return grouped(answer, images.shape, self._num_views)


def inputs_of(manifest: Manifest) -> ImageInputs:
    """Return how pictures become the members' inputs without a service.

    Raises :class:`ConfigError` as :func:`function_of_set`, by the variable TANDEM_SET_FUNCTIONS.
    """
    allowed = os.environ.get(ALLOWED_VARIABLE, "").replace(" ", "").strip("[]").split(",")
    function = function_of_set(manifest, allowed)
    inputs = manifest.inputs
    if function is None:
        return inputs
    return OwnInputs({m.name: manifest.image_of(m.name).rule for m in manifest.members}, function)


def outputs_of_views(network: LoadedNetwork, images: Pixels) -> Outputs:
    """Run (N, H, W, 3), or (N, V, H, W, 3) of which each image gets the means of its views."""
    if images.ndim == 4:
        return network.predict_all(images)
    num_images, num_views = images.shape[:2]
    flat = images.reshape(num_images * num_views, *images.shape[2:])
    step = network.max_batch_size
    parts = [network.predict_all(flat[i : i + step]) for i in range(0, len(flat), step)]

    def mean(rows: Sequence[Probabilities]) -> Probabilities:
        by_view = np.concatenate(rows).reshape(num_images, num_views, -1)
        return np.asarray(by_view.mean(axis=1, dtype=np.float32))

    features = [own for _, own in parts if own is not None]
    return mean([rows for rows, _ in parts]), mean(features) if features else None
