"""A set of the TFLite networks that are kept beside the project, and some of its photographs."""

from pathlib import Path

from calibration.sets.add_set import NewSet

MEMBERS = {
    "v2": "mobilenet_v2_1.0_224_quant.tflite",
    "v1": "mobilenet_v1_0.75_192_quant.tflite",
    "small": "mobilenet_v1_0.5_160_quant.tflite",
}


def new_set(folder: Path) -> NewSet:
    return NewSet(
        name="mobilenets",
        members=[(name, folder / "tflite" / file) for name, file in MEMBERS.items()],
        labels=folder / "labels.txt",
        class_ids=folder / "class_ids.txt",
    )


def links(images: Path, into: Path, num_images: int) -> Path:
    """Make an ImageFolder of evenly taken photographs; one of a class, as ``images`` has them."""
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    for folder in folders[:: max(1, len(folders) // num_images)][:num_images]:
        (photo,) = folder.iterdir()
        (into / folder.name).mkdir(parents=True)
        (into / folder.name / photo.name).symlink_to(photo)
    return into
