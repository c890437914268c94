"""Tries the operator's own functions on generated input, before the service starts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from app.errors import ConfigError
from app.functions.answers import WrongAnswerError, as_pixels, as_rows, check_scores
from app.functions.loading import SIGNATURES, OwnFunction, load_function
from app.setting_values import check_form_fits
from app.settings import AnswerPolicy, Settings
from models.ensemble import Probabilities
from models.manifest import Manifest
from models.runtime import Pixels

SEED = 17
NUM_IMAGES = (1, 3)  # in each call: a function must accept any number
A = TypeVar("A", bound=npt.NDArray[np.generic])


def check_functions(settings: Settings, manifest: Manifest) -> None:
    """Import and try the functions that the settings name.

    Raises:
        ConfigError: a function cannot be imported, does not fit its signature, raises, or returns a
            wrong result.

    """
    if (preprocess := load_function(settings.preprocess, "preprocess")) is not None:
        try_preprocess(preprocess, manifest, settings.max_files, settings.max_queued_images)
    if (combine := load_function(settings.combine, "combine")) is not None:
        try_combine(combine, manifest, settings.answer_policy)


def try_preprocess(
    function: OwnFunction, manifest: Manifest, max_files: int, max_queued: int
) -> int:
    """Call the function on generated pixels; return its number of views per image.

    Raises:
        ConfigError: see :func:`check_functions`; or the members' queues are too short for the
            views.

    """
    views: int | None = None
    sizes = sorted({rule.input_size for rule in manifest.inputs.rules})
    for num_images, size in product(NUM_IMAGES, sizes):
        images = _pixels(num_images, size)
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
    for num_images, names in _trials(list(weights), policy):
        shape = (num_images, manifest.num_classes)
        draw = _scores if is_multi_label else _rows
        members = {name: read_only(draw(shape, seed)) for seed, name in enumerate(names)}
        with _failures_named(function, f"float32 {shape} of {', '.join(names)}"):
            answer = function.call(members, scaled(weights, names))
            rows = as_rows(answer, shape, is_multi_label=is_multi_label)
            if is_multi_label:
                check_scores(rows)


def scaled(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return these members' weights, summing to one."""
    total = sum(weights[name] for name in names)
    return {name: weights[name] / total for name in names}


def read_only(array: A) -> A:
    """Return a read-only view of the array."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _trials(names: list[str], policy: AnswerPolicy) -> list[tuple[int, list[str]]]:
    fewest = [] if policy == "all" else [(1, names[:1])]  # a single member may answer
    return [*((num_images, names) for num_images in NUM_IMAGES), *fewest]


def _pixels(num_images: int, size: int) -> Pixels:
    shape = (num_images, size, size, 3)
    return np.random.default_rng(SEED).integers(0, 256, shape, np.uint8)


def _rows(shape: tuple[int, int], seed: int) -> Probabilities:
    drawn = np.random.default_rng((SEED, seed)).random(shape, np.float32) + np.float32(1e-3)
    rows: Probabilities = drawn / drawn.sum(axis=1, keepdims=True)
    return rows


def _scores(shape: tuple[int, int], seed: int) -> Probabilities:
    """Return scores of images that have every label: 0.99 or more."""
    drawn = np.random.default_rng((SEED, seed)).random(shape, np.float32)
    scores: Probabilities = np.float32(0.99) + np.float32(0.009) * drawn
    return scores


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
