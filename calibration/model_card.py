"""The model card: what the set is, what was measured, how to make it again."""

from pathlib import Path

from models.manifest import Manifest

REMAKE = """\
pip install -e '.[train]' -c constraints.txt
for network in resnet50 densenet169; do
    python -m calibration.train $network --images TRAIN --images CALIBRATION --run-dir runs \\
        --sizes 10x64,40x96,10x128
done
python -m calibration.bundle --checkpoints runs --calibration CALIBRATION --evaluation EVAL \\
    --input-size {size} --resize-shorter {resize} --out models/imagenette
"""


def write_model_card(folder: Path, manifest: Manifest) -> None:
    """Write ``README.md`` into the set's folder, every figure taken from the manifest."""
    names = [*(member.name for member in manifest.members), "ensemble"]
    rows = [
        f"| {r.precision} | " + " | ".join(f"{r.top1[name]:.4f}" for name in names) + " |"
        for r in manifest.accuracy
    ]
    first = manifest.accuracy[0]
    image = manifest.image
    labels = (folder / manifest.labels.path).read_text("utf-8").split("\n")
    remake = REMAKE.format(size=image.input_size, resize=image.resize_shorter)
    lines = [
        f"# Model card: {manifest.name}",
        "",
        f"{manifest.description} {manifest.num_classes} classes: "
        f"{', '.join(label for label in labels if label)}.",
        "",
        f"Input: uint8 (N, {image.input_size}, {image.input_size}, 3) {image.color_order}; shorter "
        f"side resized to {image.resize_shorter}, centre crop. Output: probabilities.",
        "",
        f"Top-1 on {first.num_images} images ({first.dataset}), none of them seen in training or "
        f"calibration, measured {first.measured} on {first.cpu}:",
        "",
        "| precision | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * len(names),
        *rows,
        "",
        f"FP16 is the float network: weights stored as FP16, run in {first.float_type}. INT8 is",
        f"what is served; its other layers ran in {manifest.accuracy[-1].float_type} here. Trained",
        "from scratch on 4,000 images of the Imagenette training split: good for trying Tandem",
        "out, not for telling anything from anything else. Every image is put into one of the",
        "ten classes.",
        "",
        "## Making it again",
        "",
        "TRAIN, CALIBRATION and EVAL are ImageFolders of Imagenette (160 px), split by the sha1 of",
        "the file name: modulo 100 below 15 is EVAL, the 50 lowest others per class CALIBRATION.",
        "",
        "These weights had a first stage of their own (8 to 12 epochs, mostly at 64 px); the last",
        "50 epochs are this script's, started from it with --init: 95 minutes on two shared cores,",
        "both networks at once. What the commands below give will be close, not the same.",
        "",
        "```sh",
        remake.rstrip(),
        "```",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", "utf-8")
