"""Sets learned from 5, 10, 20 and 50 photographs a class: accuracy, seconds, foreign photographs.

    python tests/load/learning.py TRAIN EVAL --foreign FOLDER --from imagenet --json FILE
    python tests/load/learning.py TRAIN EVAL --problem alike --problem many --json FILE

TRAIN and EVAL have a folder for each class. Two more problems are drawn: eight classes that are
foreign to the networks, and eleven that are alike. Each set is judged on all of EVAL, beside
scikit-learn's logistic regression on the same features. ``many`` learns 2,000 drawn classes. With
--problem the rows of others stay in FILE.
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
from drawn_photographs import write_drawn, write_many
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
MANY, EACH = 2000, 2  # drawn classes, and photographs of each


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
    problem: Annotated[
        list[str] | None, typer.Option(help="photographs, drawn, alike, many")
    ] = None,
) -> None:
    """Learn sets of the problems, and write what they are worth."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        problems = {"photographs": (train, evaluated)}
        for kind in ("drawn", "alike"):
            classes = "foreign" if kind == "drawn" else kind
            judging = write_drawn(work / f"{kind}-eval", NUM_DRAWN, 2, classes)
            problems[kind] = write_drawn(work / f"{kind}-train", max(SIZES), 1, classes), judging
        result: dict[str, Any] = {"problems": {}}
        if problem and json_file is not None and json_file.exists():
            result = json.loads(json_file.read_text("utf-8"))
        result["machine"] = _without_paths(describe())
        asked = problem or [*problems, "many"]
        if "many" in asked:
            result["many"] = _many(work, origin, cache)
        for name, (learned, judged) in problems.items():
            if name not in asked:
                continue
            rows = result["problems"][name] = []
            for size in SIZES:
                place = work / f"{name}-{size}"
                rows.append(_row(place, learned, judged, size, origin, cache, foreign))
                if json_file is not None:  # the rest takes minutes
                    write_result(result, json_file)
        if others is not None:
            place = work / "photographs-none"
            result["with_none"] = _row(place, train, evaluated, 20, origin, cache, foreign, others)
    write_result(result, json_file)


def _many(work: Path, origin: str, cache: Path | None) -> dict[str, Any]:
    """Learn many classes of few photographs; seconds are those with features that are kept."""
    images = write_many(work / "many", MANY, EACH)
    result: dict[str, Any] = {"num_classes": MANY, "photographs_a_class": EACH}
    for seconds in ("seconds_with_features", "seconds"):
        told, result[seconds], result["peak_mib"] = _learned(work / seconds, images, origin, cache)
    top1 = {p: of[ENSEMBLE]["top1"] for p, of in told["accuracy"]["scores"].items()}
    return result | {"held_out": top1, "num_photographs": told["num_photographs"]}


def _learned(
    work: Path, images: Path, origin: str, cache: Path | None, *options: object
) -> tuple[dict[str, Any], float, int]:
    """Learn a set by the command; return its facts, seconds, and the most memory, in MiB."""
    command = [TANDEM, "learn", "own", "--images", images, "--from", origin, *options]
    command += ["--into", work / "sets", "--json", work / "out.json"]
    work.mkdir(exist_ok=True)
    place = (cache or work.parent / "cache").absolute()
    environment = {**os.environ, "XDG_CACHE_HOME": str(place)}
    started = time.perf_counter()
    child = subprocess.Popen(list(map(str, command)), env=environment)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0
    seconds = round(time.perf_counter() - started, 1)
    return json.loads((work / "out.json").read_text("utf-8")), seconds, used.ru_maxrss // 1024


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
    cache, before = cache or work / "cache", os.times()
    options = () if others is None else ("--others", others)
    told, seconds, _ = _learned(work, work / "some", origin, cache, *options)
    after = os.times()
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
        "seconds": seconds,
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
