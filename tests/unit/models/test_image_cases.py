"""Files that decoders read differently show their right picture, or are refused with the reason."""

import re
from pathlib import Path

import numpy as np
import pytest

from models.errors import ImageError
from models.image import ImageRule, read_image
from tests.support.image_cases import CASES, FURTHER, SIDE, Case
from tests.support.images import difference

RULE = ImageRule(SIDE, SIDE)
LARGEST = 4  # levels: JPEG and lossy WebP do not keep red and blue to the last one
EDGE = 2  # pixels on each side of the line between both colours, which they smear


def check(case: Case, data: bytes) -> None:
    if case.code:
        with pytest.raises(ImageError) as caught:
            read_image(data, RULE)
        assert (caught.value.code, caught.value.status) == (case.code, case.status)
        assert re.search(case.says, caught.value.message)
        return
    away = np.r_[0 : SIDE // 2 - EDGE, SIDE // 2 + EDGE : SIDE]
    shown, right = read_image(data, RULE)[..., ::-1], case.picture
    assert difference(shown[away][:, away], right[away][:, away])[0] <= LARGEST


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: case.name)
def test_each_kind(case):
    check(case, case.make())


@pytest.mark.shared_data
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_file_that_failed(shared_data: Path, case):
    check(case, (shared_data.parent / "cases" / "images" / case.name).read_bytes())


@pytest.mark.shared_data
def test_every_file_that_failed_is_in_the_table(shared_data: Path):
    folder = shared_data.parent / "cases" / "images"
    assert {path.name for path in folder.iterdir()} == {case.name for case in CASES}
