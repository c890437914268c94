"""Files that decoders read differently, through the whole service: the right picture or refusal.

The service shows no pixels. A file's answer must be that of the plain PNG of what it shows, and
nearer to it than to the PNG of any other picture.
"""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.image_cases import (
    ABOVE_BELOW,
    CASES,
    LARGE_CHUNKS,
    LEFT_RIGHT,
    PLAIN_GRAY,
    PLAIN_WHITE,
    Case,
)
from tests.support.images import encode

PICTURES = {
    picture.tobytes(): picture for picture in (LEFT_RIGHT, ABOVE_BELOW, PLAIN_GRAY, PLAIN_WHITE)
}


def probabilities(client: httpx.Client, data: bytes) -> NDArray[np.float64]:
    """Return the ensemble's answer to a file, by class."""
    answer = client.post("/v1/classify?top_k=10", content=data).raise_for_status().json()
    by_class = sorted(answer["predictions"], key=lambda prediction: prediction["index"])
    return np.array([prediction["probability"] for prediction in by_class])


@pytest.fixture(scope="module")
def right_answers(service_url: str) -> dict[bytes, NDArray[np.float64]]:
    """Return the answer to each picture's plain PNG."""
    with httpx.Client(base_url=service_url, timeout=60) as client:
        return {
            key: probabilities(client, encode(picture, "PNG")) for key, picture in PICTURES.items()
        }


def check(
    client: httpx.Client, case: Case, data: bytes, answers: dict[bytes, NDArray[np.float64]]
) -> None:
    if case.code:
        answer = client.post("/v1/classify", content=data)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (case.status, case.code)
        assert re.search(case.says, error["message"])
        return
    answer = probabilities(client, data)
    distances = {key: float(np.abs(answer - other).max()) for key, other in answers.items()}
    assert min(distances, key=distances.__getitem__) == case.picture.tobytes(), distances


@pytest.mark.parametrize("case", [*CASES, *LARGE_CHUNKS], ids=lambda case: case.name)
def test_each_kind(client, right_answers, case):
    check(client, case, case.make(), right_answers)


@pytest.mark.shared_data
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_file_that_failed(client, right_answers, shared_data: Path, case):
    data = (shared_data.parent / "cases" / "images" / case.name).read_bytes()
    check(client, case, data, right_answers)
