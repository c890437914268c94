"""Answers of ``:predict`` by rows and by columns."""

import json
from typing import Any

import numpy as np
import pytest

from app.oip.bodies import InferAnswer, OutputTensor
from app.oip.tensorflow_serving import Prediction

ROWS = [[0.75, 0.5], [0.25, 0.5]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"instances": [{"b64": ""}] * 2},
            {
                "predictions": [
                    {"probabilities": ROWS[0], "label": ["a", "b"]},
                    {"probabilities": ROWS[1], "label": ["b"]},
                ]
            },
        ),
        (
            {"inputs": {"image": [{"b64": ""}] * 2}},
            {"outputs": {"probabilities": ROWS, "label": [["a", "b"], ["b", ""]]}},
        ),
    ],
)
def test_rows_lose_what_fills_them_and_columns_are_arrays(asked: Any, expected: Any) -> None:
    """As several labels of an image: empty ones fill the shorter row."""
    prediction = Prediction()
    (tensor,) = prediction.parse(json.dumps(asked).encode()).inputs
    assert tensor.shape == (2,)
    labels = OutputTensor("label", (2, 2), [b"a", b"b", b"b", b""])
    rows = OutputTensor("probabilities", (2, 2), np.array(ROWS, np.float32))
    answer = InferAnswer("m", "1", "", (rows, labels), {"sure": False})
    body, num_json = prediction.render(answer)
    assert (json.loads(body), num_json) == (expected | {"parameters": {"sure": False}}, None)
