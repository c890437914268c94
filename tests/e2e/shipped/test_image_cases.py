"""Files that decoders read differently, through the whole service.

The service shows no pixels. It must answer as the networks do in this process to the picture that
models/image.py reads, which tests/unit/models/test_image.py compares with the right one.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.image_cases import CASES, FURTHER
from tests.support.services.live_service import SAME_PROBABILITY

InProcess = Callable[[bytes], NDArray[np.float32]]


def check(client, in_process, case, data):
    answer = client.post("/v1/classify?top_k=10", content=data)
    assert answer.status_code == case.status, answer.text
    if case.code:
        error = answer.json()["error"]
        assert error["code"] == case.code
        assert re.search(case.says, error["message"])
        return
    by_class = {row["index"]: row["probability"] for row in answer.json()["predictions"]}
    expected = dict(enumerate(in_process(data).tolist()))
    assert by_class == pytest.approx(expected, abs=SAME_PROBABILITY)


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: case.name)
def test_each_kind(client, in_process, case):
    check(client, in_process, case, case.make())


@pytest.mark.shared_data
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_file_that_failed(client, in_process, shared_data, case):
    data = (shared_data.parent / "cases" / "images" / case.name).read_bytes()
    check(client, in_process, case, data)
