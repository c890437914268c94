"""Sets learned from 5, 10, 20 and 50 photographs a class: accuracy, seconds, foreign photographs.

    python tests/load/learning.py TRAIN EVAL --foreign FOLDER --from imagenet --json FILE

TRAIN and EVAL have a folder for each class; a second problem, of eight drawn classes, is made. Each
set is judged on all of EVAL, beside scikit-learn's logistic regression on the same features.
"""

import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from drawn_photographs import write_drawn
from machine import describe, write_result
from running import TANDEM
from sklearn.linear_model import LogisticRegression

from calibration.datasets import find_images
from calibration.evaluation.fitting import Classes
from calibration.evaluation.inference import Networks
from calibration.learning.features import FeatureCache, backbones_of, compute
from calibration.learning.heads import softmax
from calibration.learning.photographs import photographs_of, read_photographs
from calibration.statistics import Tally
from models.ensemble import Probabilities, average, tempered
from models.manifest import ENSEMBLE
from models.model_set import ModelSet, load_model_set

SIZES = (5, 10, 20, 50)
NUM_DRAWN = 60  # of each class, that judge


def main(
    train: Path,
    evaluated: Annotated[Path, typer.Argument(metavar="EVAL")],
    foreign: Annotated[Path | None, typer.Option(help="photographs of other classes")] = None,
    others: Annotated[Path | None, typer.Option(help="to learn the class none from")] = None,
    origin: Annotated[str, typer.Option("--from")] = "imagenet",
    cache: Annotated[
        Path | None, typer.Option(help="of features, kept; seconds are then without computing them")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Learn sets of both problems, and write what they are worth."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_drawn(work / "drawn-train", max(SIZES), 1)
        write_drawn(work / "drawn-eval", NUM_DRAWN, 2)
        problems = {
            "photographs": (train, evaluated),
            "drawn": (work / "drawn-train", work / "drawn-eval"),
        }
        result: dict[str, Any] = {"machine": _without_paths(describe()), "problems": {}}
        for problem, (learned, judged) in problems.items():
            rows = result["problems"][problem] = []
            for size in SIZES:
                place = work / f"{problem}-{size}"
                rows.append(_row(place, learned, judged, size, origin, cache, foreign))
                if json_file is not None:  # the rest takes minutes
                    write_result(result, json_file)
        if others is not None:
            place = work / "photographs-none"
            result["with_none"] = _row(place, train, evaluated, 20, origin, cache, foreign, others)
    write_result(result, json_file)


def _without_paths(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"command": "python tests/load/learning.py TRAIN EVAL --json FILE"}


def _row(
    work: Path,
    train: Path,
    judged: Path,
    size: int,
    origin: str,
    cache: Path | None,
    foreign: Path | None,
    others: Path | None = None,
) -> dict[str, Any]:
    for folder in sorted(path for path in train.iterdir() if path.is_dir()):
        files = sorted(folder.iterdir())
        random.Random(1).shuffle(files)
        (place := work / "some" / folder.name).mkdir(parents=True)
        for file in files[:size]:
            (place / file.name).symlink_to(file.resolve())
    command = [TANDEM, "learn", "own", "--images", work / "some", "--from", origin]
    command += ["--into", work / "sets", "--json", work / "out.json"]
    command += [] if others is None else ["--others", others]
    started, before = time.perf_counter(), os.times()
    cache = cache or work / "cache"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.absolute())}
    subprocess.run(list(map(str, command)), check=True, env=environment)
    seconds, after = time.perf_counter() - started, os.times()
    told = json.loads((work / "out.json").read_text("utf-8"))
    model_set = load_model_set(str(work / "sets" / "own"))
    rows, logistic, truth = _answers(model_set, judged, FeatureCache(cache / "tandem/features"))
    tallies = {name: Tally(len(model_set.labels)) for name in rows}
    for name, tally in tallies.items():
        tally.add(rows[name], truth)
    top1 = {name: tally.score.model_dump() for name, tally in tallies.items()}
    held_out = told["accuracy"]["scores"]
    return {
        "photographs_a_class": size,
        "num_photographs": told["num_photographs"],
        "num_evaluated": len(truth),
        "top1": {name: score["top1"] for name, score in top1.items()},
        "ensemble_interval": top1[ENSEMBLE]["top1_interval"],
        "calibration_error": top1[ENSEMBLE]["calibration_error"],
        "held_out": {p: of[ENSEMBLE]["top1"] for p, of in held_out.items()},
        "held_out_interval": held_out["INT8"][ENSEMBLE]["top1_interval"],
        "logistic_regression": {
            name: round(float((of.argmax(axis=1) == truth).mean()), 4)
            for name, of in logistic.items()
        },
        "sure": told["sure"],
        "num_near_duplicates": told["num_near_duplicates"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(after[2:4]) - sum(before[2:4]), 1),
        "foreign": None if foreign is None else _foreign(model_set, foreign),
    }


def _answers(
    model_set: ModelSet, judged: Path, cache: FeatureCache
) -> tuple[dict[str, Probabilities], dict[str, Probabilities], Classes]:
    """Return the rows (N, C) of the INT8 networks and of logistic regression, and the classes.

    The networks' heads are applied to features, which all numbers of photographs share.
    """
    learned, labels = photographs_of(model_set), list(model_set.labels)
    new = read_photographs([judged]).photographs
    truth = np.array([labels.index(photograph.label) for photograph in new])
    classes = np.repeat([labels.index(photograph.label) for photograph in learned], 2)
    int8 = {n: b for n, b in backbones_of(model_set).items() if n[1] == "INT8"}
    compute(int8, new, model_set.manifest.inputs, cache, lambda batches, _: batches)
    rows, logistic, manifest = {}, {}, model_set.manifest
    for (member, _), backbone in int8.items():
        of_new = cache.features(backbone, [photograph.sha256 for photograph in new])[:, 0]
        head = next(n for n in backbone.whole.get_ops() if n.get_friendly_name() == "head")
        (shift,) = head.output(0).get_target_inputs()
        weights = head.input_value(1).get_node().data
        bias = shift.get_node().input_value(1).get_node().data
        own = softmax(of_new.astype(np.float64) @ weights + bias)
        rows[member] = tempered(own, manifest.temperatures[member])
        features = cache.features(backbone, [photograph.sha256 for photograph in learned])
        model = LogisticRegression(max_iter=1000)
        model.fit(features.reshape(len(classes), -1), classes)
        logistic[member] = model.predict_proba(of_new).astype(np.float32)
    rows[ENSEMBLE] = average(rows, manifest.weights, manifest.temperature)
    logistic[ENSEMBLE] = average(logistic, manifest.weights)
    return rows, logistic, truth


def _foreign(model_set: ModelSet, folder: Path) -> dict[str, int | None]:
    """Return how many photographs of other classes would be sure, and not ``none``."""
    if (bound := model_set.manifest.sure) is None:
        return {"num": len(find_images(folder)), "num_sure": None}
    networks = Networks(model_set, ("INT8",))
    inputs, sure = model_set.manifest.inputs, 0
    paths = find_images(folder)
    for path in paths:
        pixels = inputs.read(path.read_bytes())[None]
        row = networks.run(pixels)["INT8"][ENSEMBLE][0]
        is_none = model_set.labels[int(row.argmax())] == "none"
        sure += bool(row.max() >= np.float32(bound.probability)) and not is_none
    return {"num": len(paths), "num_sure": sure}


if __name__ == "__main__":
    typer.run(main)
