"""The gate's errors by chance: the committed simulation, and a small one made anew."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests/load/results/gate_simulation.json"
MOST = 0.05


def errors(row: dict) -> list[float]:
    """Return how often equal INT8 is refused, by members, and a loss of two points verified."""
    return [*row["equal_refused"].values(), row["losing_verified"]]


def test_neither_error_is_likelier_than_one_in_twenty():
    result = json.loads(RESULT.read_text("utf-8"))
    rows = result["rows"]
    assert {1, 50, 400, 1451, 10_000} <= {row["num_images"] for row in rows}
    assert {len(row["equal_refused"]) for row in rows} == {3}
    assert max(max(errors(row)) for row in rows) <= MOST
    before = [row for row in rows if row["num_images"] == 700]
    assert max(max(row["equal_refused_before"].values()) for row in before) > 0.6
    assert max(row["losing_verified_before"] for row in before) > 0.1


@pytest.mark.slow  # make test reads the figures that are committed
def test_a_simulation_made_anew_finds_the_same():
    command: list[str | Path] = [
        sys.executable,
        ROOT / "tests/load/gate_simulation.py",
        "--draws",
        "2000",
    ]
    sizes: list[str | Path] = ["--num-images", "50", "--num-images", "400", "--seed", "1"]
    done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
    kept = {(r["num_images"], r["differing"]): r for r in json.loads(RESULT.read_text())["rows"]}
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 10
    for row in rows:
        same = kept[row["num_images"], row["differing"]]
        assert max(errors(row)) <= MOST
        for now, then in zip(errors(row), errors(same), strict=True):
            assert abs(now - then) < 0.02
        for what in ("equal_verified", "losing_refused"):
            assert abs(row[what] - same[what]) < 0.06
