"""The gate's errors by chance: the committed figures of decision 0011, and some drawn anew."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calibration.statistics import Paired
from models.ledger import judged

FILE = Path(__file__).parents[3] / "tests/load/results/gate_simulation.json"
RESULT = json.loads(FILE.read_text("utf-8"))
MOST = 0.05
NUM_DRAWS = 2000  # evaluations
NUM_FIGURES = {"1 members": 2, "2 members": 3, "3 members": 4}  # with the ensemble's


def test_neither_error_is_likelier_than_one_in_twenty():
    rows = RESULT["rows"]
    assert {1, 50, 400, 1451, 10_000} <= {row["num_images"] for row in rows}
    assert {len(row["equal_refused"]) for row in rows} == {3}
    errors = [e for row in rows for e in (*row["equal_refused"].values(), row["losing_verified"])]
    assert max(errors) <= MOST
    before = [row for row in rows if row["num_images"] == 700]
    assert max(max(row["equal_refused_before"].values()) for row in before) > 0.6
    assert max(row["losing_verified_before"] for row in before) > 0.1


@pytest.mark.parametrize("num_images", [50, 400])
def test_evaluations_drawn_anew_are_judged_as_the_committed_ones(num_images):
    rows = [row for row in RESULT["rows"] if row["num_images"] == num_images]
    assert len(rows) == 5
    for row in rows:
        equal = {name: shares(row, 0.0, number) for name, number in NUM_FIGURES.items()}
        losing = shares(row, RESULT["loss"], 1)
        for name, number in NUM_FIGURES.items():
            refused = 1 - (1 - equal[name]["refused"]) ** number
            assert refused <= MOST
            assert abs(refused - row["equal_refused"][name]) < 0.02
        assert losing["verified"] <= MOST
        assert abs(losing["verified"] - row["losing_verified"]) < 0.02
        assert abs(equal["1 members"]["verified"] - row["equal_verified"]) < 0.06
        assert abs(losing["refused"] - row["losing_refused"]) < 0.06


def shares(row: dict, loss: float, num_figures: int) -> dict[str, float]:
    """Draw evaluations of a classifier among ``num_figures``; return how often each outcome is."""
    only_float = (max(row["differing"], loss) + loss) / 2
    chances = [only_float, only_float - loss, 1 - 2 * only_float + loss]
    drawn = np.random.default_rng(1).multinomial(row["num_images"], chances, NUM_DRAWS)
    outcomes: Counter[str] = Counter()
    for (worse, better), times in Counter(map(tuple, drawn[:, :2].tolist())).items():
        drop = Paired(row["num_images"], worse, better).drop
        (judgement,) = judged({"": drop}, row["num_images"], RESULT["max_drop"], num_figures)
        outcomes[judgement.outcome] += times
    return {what: outcomes[what] / NUM_DRAWS for what in ("refused", "verified")}
