"""How often the accuracy gate is wrong by chance: ``python tests/load/gate_simulation.py``.

Draws evaluations of INT8 that is as good as float, and of INT8 that loses two points, with few and
with many images that only one of both has right. Prints the shares of sets that the gate refuses
and verifies, beside those of the rule that it replaced: refused if the loss is over ``max_drop``,
else verified.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from result_file import write_result

from calibration.statistics import Paired
from models.ledger import bound, judged

MAX_DROP = 0.005
LOSS = 0.02
NUM_IMAGES = (1, 50, 400, 700, 1451, 10_000)
# Shares of images whose answer is right in one of both alone: 0.01 is that of the bundled set, 0.02
# to 0.06 of networks with 1,000 classes.
DIFFERING = (0.002, 0.01, 0.02, 0.06, 0.15)
NUM_MEMBERS = (1, 2, 3)


@dataclass(frozen=True)
class Shares:
    """Of one classifier's evaluations."""

    refused: float
    verified: float
    over: float  # with a measured loss over max_drop


def main(
    draws: Annotated[int, typer.Option(help="evaluations of each kind")] = 20_000,
    seed: int = 37,
    num_images: Annotated[list[int] | None, typer.Option(help="of an evaluation")] = None,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Print the result as JSON."""
    rng = np.random.default_rng(seed)
    sizes = num_images or NUM_IMAGES
    rows = [_row(rng, draws, size, share) for size in sizes for share in DIFFERING]
    result = {
        "command": f"python tests/load/gate_simulation.py --draws {draws} --seed {seed}",
        "max_drop": MAX_DROP,
        "loss": LOSS,
        "rows": rows,
        "worst": {
            "equal_refused": max(max(row["equal_refused"].values()) for row in rows),
            "losing_verified": max(row["losing_verified"] for row in rows),
        },
    }
    write_result(result, out)


def _row(rng: np.random.Generator, draws: int, num_images: int, share: float) -> dict[str, Any]:
    """Return the shares of one number of images and of differing answers."""
    sets = {f"{number} members": number + (number > 1) for number in NUM_MEMBERS}  # figures
    equal = {name: shares(rng, draws, num_images, share, 0.0, n) for name, n in sets.items()}
    losing = shares(rng, draws, num_images, share, LOSS, 1)
    return {
        "num_images": num_images,
        "bound": round(bound(MAX_DROP, num_images), 5),
        "differing": share,
        # Of a set's figures each is drawn by itself: members that err alike are refused less often.
        "equal_refused": {n: _any(equal[n].refused, sets[n]) for n in sets},
        "equal_refused_before": {n: _any(equal[n].over, sets[n]) for n in sets},
        "equal_verified": round(equal["1 members"].verified, 4),
        # All others of its set verify: else it would be verified less often.
        "losing_verified": round(losing.verified, 4),
        "losing_verified_before": round(1 - losing.over, 4),
        "losing_refused": round(losing.refused, 4),
    }


def shares(
    rng: np.random.Generator,
    draws: int,
    num_images: int,
    differing: float,
    loss: float,
    num_figures: int,
) -> Shares:
    """Draw evaluations of one classifier among ``num_figures`` and return how they are judged."""
    only_float = (max(differing, loss) + loss) / 2
    chances = [only_float, only_float - loss, 1 - 2 * only_float + loss]
    drawn = Counter(map(tuple, rng.multinomial(num_images, chances, draws)[:, :2].tolist()))
    totals: Counter[str] = Counter()
    for (only_first, only_second), times in drawn.items():
        drop = Paired(num_images, only_first, only_second).drop
        (judgement,) = judged({"": drop}, num_images, MAX_DROP, num_figures)
        totals[judgement.outcome] += times
        totals["over"] += times * (drop.top1 > MAX_DROP)
    return Shares(*(totals[what] / draws for what in ("refused", "verified", "over")))


def _any(chance: float, number: int) -> float:
    return round(1 - (1 - chance) ** number, 4)


if __name__ == "__main__":
    typer.run(main)
