"""``golden.json``: the members' recorded answers to the golden images."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from models.errors import ModelSetError
from models.record import Precision, Record

GOLDEN_NAME = "golden.json"
NUM_IMAGES = 32
TopClasses = list[tuple[int, float]]  # (class index, probability), likeliest first


class GoldenAnswer(Record):
    """The golden answers of one network, and the machine that computed them."""

    cpu: str
    float_type: str
    rows: Annotated[list[TopClasses], Field(min_length=NUM_IMAGES, max_length=NUM_IMAGES)]


class Golden(Record):
    """The whole of ``golden.json``; the images are :func:`models.golden.golden_images`."""

    answers: dict[str, dict[Precision, GoldenAnswer]]  # by member


def read_golden(path: Path) -> Golden:
    """Read a set's ``golden.json``; the caller must compare its hash."""
    try:
        return Golden.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ModelSetError(f"{path}: {error.errors()[0]['msg']}; make the set again") from error
