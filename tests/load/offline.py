"""``tandem classify --offline`` and the bound, in turns: ``python tests/load/offline.py IMAGES``.

Each round runs both commands, on the same images. The bound is ``tandem bench --limit``: the same
decoder and networks, its best setup of all, nothing kept. ``--json FILE`` writes the result.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from machine import describe
from result_file import write_result

TANDEM = Path(sys.executable).with_name("tandem")
SAID = re.compile(r"(\d+) images classified.*\(([\d.]+) images/s\)", re.S)


def main(
    images: Path,
    model_set: str = "imagenette",
    rounds: int = 3,
    duration: Annotated[
        float, typer.Option(help="of bench --limit: seconds a setup, all rounds")
    ] = 10,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure both, and print the medians and the share."""
    taken: list[dict[str, Any]] = []
    for number in range(rounds):
        order = (_limit, _offline) if number % 2 == 0 else (_offline, _limit)
        taken.append({k: v for run in order for k, v in run(images, model_set, duration).items()})
        typer.echo(json.dumps(taken[-1]), err=True)
    limit, rate = (median(r[name] for r in taken) for name in ("limit_per_s", "offline_per_s"))
    result = {
        **describe(),
        "model_set": model_set,
        "images": str(images.name),
        "num_images": taken[0]["num_images"],
        "limit_per_s": limit,
        "offline_per_s": rate,
        "offline_of_limit": round(rate / limit, 3),
        "start_s": median(r["start_s"] for r in taken),
        "rounds": taken,
    }
    write_result(result, json_file)


def _limit(images: Path, model_set: str, duration: float) -> dict[str, Any]:
    words = ["--images", images, "--model-set", model_set, "--duration", duration, "--json", "-"]
    limit = json.loads(_tandem("bench", "--limit", *words).stdout)["limit"]
    return {"limit_per_s": limit["images_per_s"], "limit_setup": limit["best"]}


def _offline(images: Path, model_set: str, _: float) -> dict[str, Any]:
    """Classify all images into a new file; its start is all that is no classifying."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model-set", model_set, "--out", Path(folder) / "answers.jsonl", images]
        started = time.perf_counter()
        done = _tandem("classify", "--offline", *words)
        wall_s = time.perf_counter() - started
    said = SAID.search(done.stderr)
    assert said, done.stderr
    num, rate = int(said[1]), float(said[2])
    return {
        "num_images": num,
        "offline_per_s": rate,
        "offline_wall_s": round(wall_s, 2),
        "start_s": round(wall_s - num / rate, 2),
    }


def _tandem(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (TANDEM, *words)]
    return subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    typer.run(main)
