"""The golden check: a network must answer generated images as it did when the set was made.

Hashes detect damaged files. This detects wrong results: from instructions on which INT8 saturates,
a driver that rounds in another way, or another version of the runtime. Each network runs on
generated images. Its likeliest classes are compared with those in the set's ``golden.json``.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from models.ensemble import Probabilities
from models.errors import ModelSetError, reading
from models.image import Size, sides_of
from models.machine import cpu_model, instructions_of
from models.network import LoadedNetwork, Pixels
from models.record import Precision, Record

GOLDEN_NAME = "golden.json"
NUM_IMAGES = 32
TopClasses = list[tuple[int, float]]  # (class index, probability), likeliest first
NUM_KEPT = 5  # likeliest classes stored per image
# The tolerated change of the stored probabilities, as a share of their sum: first with the
# recording's CPU instructions and float type, then with others. Decision 0007 has the effects of
# other instructions, float types and faults.
TOLERANCE = 0.1
OTHER_CPU_TOLERANCE = 0.25
LEAST_SUM = 0.01  # of an image's probabilities: all scores of a multi-label set may be near 0
SURE_MARGIN = 0.3  # with at least this margin, the first class must stay the same
MAX_FLIPPED = 1  # among these images; rounding may flip one


class GoldenMismatchError(ModelSetError):
    """A network answers otherwise than where the set was made: it must not serve."""

    code = "golden_mismatch"


class GoldenAnswer(Record):
    """The golden answers of one network, and the machine that computed them."""

    cpu: str
    float_type: str
    rows: Annotated[list[TopClasses], Field(min_length=NUM_IMAGES, max_length=NUM_IMAGES)]


class Golden(Record):
    """The whole of ``golden.json``; the images are :func:`golden_images`."""

    answers: dict[str, dict[Precision, GoldenAnswer]]  # by member


def read_golden(path: Path) -> Golden:
    """Read a set's ``golden.json``; the caller must compare its hash."""
    try:
        with reading(path):
            return Golden.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ModelSetError(f"{path}: {error.errors()[0]['msg']}; make the set again") from error


def golden_images(size: Size, num_images: int = NUM_IMAGES) -> Pixels:
    """Draw uint8 (N, H, W, 3): discs and bars over gradients, in exact integer arithmetic.

    NumPy's legacy generator, whose stream is frozen, gives the same images on every machine.
    """
    rng = np.random.RandomState(20)
    height, width = sides_of(size)
    y, x = np.mgrid[0:height, 0:width]
    long = max(height, width)
    images = np.empty((num_images, height, width, 3), np.uint8)
    for image in images:
        corners = rng.randint(0, 256, (3, 3))
        image[:] = (
            corners[0] * (height + width - x - y)[..., None] + corners[1] * (x + y)[..., None]
        ) // (height + width)
        for _ in range(rng.randint(2, 7)):
            center_y, center_x, radius = rng.randint(0, long, 3)
            inside = (y - center_y) ** 2 + (x - center_x) ** 2 < (radius // 2) ** 2
            image[inside] = rng.randint(0, 256, 3)
        step = 2 + rng.randint(0, max(1, long // 4))
        stripes = ((x * rng.randint(0, 3) + y * rng.randint(0, 3)) // step) % 4 == 0
        image[stripes] = image[stripes] // 2 + rng.randint(0, 128, 3).astype(np.uint8)
    return images


def answer_of(network: LoadedNetwork) -> GoldenAnswer:
    """Record the answers of ``network`` on this machine."""
    rows = _run(network)
    orders = np.argsort(-rows, axis=1, kind="stable")[:, :NUM_KEPT].tolist()
    pairs = zip(rows.tolist(), orders, strict=True)
    kept = [[(i, round(row[i], 4)) for i in order] for row, order in pairs]
    return GoldenAnswer(cpu=cpu_model(), float_type=network.float_type, rows=kept)


def _run(network: LoadedNetwork) -> Probabilities:
    height, width, _ = network.input_shape
    images, step = golden_images((height, width)), network.max_batch_size
    parts = [network.predict(images[i : i + step]) for i in range(0, NUM_IMAGES, step)]
    return np.concatenate(parts)


def relative_differences(
    indices: npt.NDArray[np.int64], before: Probabilities, after: Probabilities
) -> tuple[Probabilities, Probabilities]:
    """Return the changes of stored probabilities, and their earlier values, summed by image.

    ``indices`` (N, K) are the stored classes, ``before`` (N, K) their probabilities, and ``after``
    (N, C) the probabilities to compare.
    """
    off = np.abs(np.take_along_axis(after, indices, axis=1) - before).sum(axis=1)
    return off, np.maximum(before.sum(axis=1), np.float32(LEAST_SUM))


def compare(
    expected: GoldenAnswer, answer: Probabilities, tolerance: float = TOLERANCE
) -> str | None:
    """Return how float32 (32, C) differs from the expected answer, or None if it does not."""
    indices = np.array([[index for index, _ in row] for row in expected.rows])
    before = np.array([[p for _, p in row] for row in expected.rows], np.float32)
    off, kept = relative_differences(indices, before, answer)
    share = float(off.sum() / kept.sum())
    margin = before[:, 0] - before[:, 1]
    changed = answer.argmax(axis=1) != indices[:, 0]
    flipped = np.flatnonzero(changed & (margin > SURE_MARGIN))
    if len(flipped) > MAX_FLIPPED:
        first = int(flipped[0])
        return (
            f"{len(flipped)} of {NUM_IMAGES} generated images changed their class; image {first} "
            f"was class {indices[first, 0]} at {before[first, 0]:.2f}, "
            f"now class {int(answer[first].argmax())} at {float(answer[first].max()):.2f}"
        )
    if not share <= tolerance:  # NaN is a mismatch too
        return (
            f"probabilities of {NUM_IMAGES} generated images are off by {share:.0%} of their sum; "
            f"{tolerance:.0%} is allowed"
        )
    return None


def tolerance_of(expected: GoldenAnswer, float_type: str) -> float:
    """Return the tolerance on this CPU: larger if it differs from the recording's."""
    recorded, here = (instructions_of(cpu) for cpu in (expected.cpu, cpu_model()))
    is_alike = (recorded, expected.float_type) == (here, float_type)
    return TOLERANCE if is_alike else OTHER_CPU_TOLERANCE


def check(golden: Golden, member: str, precision: Precision, network: LoadedNetwork) -> None:
    """Run the generated images through ``network`` and compare.

    Raises:
        GoldenMismatchError: the answers differ; the message names both machines.
        ModelSetError: ``golden.json`` has no answers for this network.
    """
    if (expected := golden.answers.get(member, {}).get(precision)) is None:
        raise ModelSetError(f"{GOLDEN_NAME} has no answers of {member} {precision}")
    tolerance = tolerance_of(expected, network.float_type)
    if problem := compare(expected, _run(network), tolerance):
        raise GoldenMismatchError(
            f"{member} {precision} does not answer as where the set was made: {problem}. Recorded "
            f"on {expected.cpu}, {expected.float_type}; this is {cpu_model()}, "
            f"{network.float_type}. Either this instruction set computes it wrongly, or a file of "
            "the set is damaged: tandem models verify tells, tandem quantize makes INT8 anew here"
        )
