"""What photographs in wide-gamut colours (Display P3, Adobe RGB) cost if their profile is ignored.

    python tests/load/wide_gamut.py PHOTOS --model-set SET --json FILE

PHOTOS has a folder for each class, by its id. Each photograph is saved again as JPEG: in sRGB, and
converted to the wide space with its profile. The second file is answered with the profile ignored
and converted (``icc_profiles``).
"""

import io
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import cv2
import numpy as np
import PIL
import typer
from machine import describe, write_result
from PIL import Image, ImageCms

from calibration.evaluation.inference import BATCH, Networks
from calibration.statistics import Paired
from models.accuracy import wilson_interval
from models.image import ImageInputs, Pixels
from models.model_set import load_model_set
from tests.support.icc_profiles import ADOBE_RGB, DISPLAY_P3, SRGB_CURVE, matrix_profile

PROFILES = {
    "Display P3": matrix_profile(DISPLAY_P3, SRGB_CURVE),
    "Adobe RGB": matrix_profile(ADOBE_RGB, (2.19921875,)),
}
QUALITY = 95
RELATIVE = ImageCms.Intent.RELATIVE_COLORIMETRIC


def to_space(profile: bytes) -> Any:
    """Return the transform from sRGB to a profile."""
    own, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(srgb, own, "RGB", "RGB", RELATIVE)


def saved(image: Image.Image, profile: bytes | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY, icc_profile=profile)
    return file.getvalue()


def timed(inputs: ImageInputs, data: bytes) -> tuple[Pixels, float]:
    """Return a file's pixels, and the CPU ms of this thread."""
    began = time.thread_time()
    pixels = inputs.read(data)
    return pixels, 1e3 * (time.thread_time() - began)


def compared(
    networks: Networks, inputs: ImageInputs, photos: list[tuple[int, Path]], name: str
) -> dict[str, Any]:
    """Answer each photograph in each way; count first classes that change, and right ones."""
    to, converting = to_space(PROFILES[name]), inputs.with_profiles("convert")
    first, levels, costs = defaultdict[str, list[int]](list), list[float](), list[float]()
    for start in range(0, len(photos), BATCH):
        rows: dict[str, list[Pixels]] = defaultdict(list)
        for _, path in photos[start : start + BATCH]:
            image = Image.open(path).convert("RGB")
            rows["sRGB"].append(networks.read(saved(image)))
            wide = saved(ImageCms.applyTransform(image, to), PROFILES[name])
            pixels, plain_ms = timed(inputs, wide)
            of_srgb, converted_ms = timed(converting, wide)
            rows["ignored"].append(pixels)
            rows["converted"].append(of_srgb)
            costs.append(converted_ms - plain_ms)
            off = rows["ignored"][-1].astype(np.int16) - rows["sRGB"][-1]
            levels.append(float(np.abs(off).mean()))
        for way, images in rows.items():
            answers = networks.run(np.stack(images))["INT8"]["ensemble"]
            first[way] += answers.argmax(axis=1).tolist()
    truth = np.array([index for index, _ in photos])
    plain, total = np.array(first["sRGB"]), len(photos)
    result: dict[str, Any] = {
        "images": total,
        "levels_off_in_the_mean": round(float(np.mean(levels)), 2),
        "conversion_cpu_ms": round(median(costs), 3),
        "top1_srgb": round(float((plain == truth).mean()), 4),
    }
    for way in ("ignored", "converted"):
        answers = np.array(first[way])
        changed = int((answers != plain).sum())
        paired = Paired.of(plain == truth, answers == truth)
        result[way] = {
            "first_class_changes": changed,
            "share": round(changed / total, 4),
            "interval": [round(end, 4) for end in wilson_interval(changed, total)],
            "top1": round(float((answers == truth).mean()), 4),
            "top1_lost_interval": [round(end, 4) for end in paired.drop.interval],
            "p_value": round(paired.drop.p_value, 4),
        }
    return result


def main(
    photos: Annotated[Path, typer.Argument(help="a folder a class, by its id", exists=True)],
    model_set: Annotated[str, typer.Option(help="name or folder of the set")] = "imagenette",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write it here")] = None,
) -> None:
    """Answer photographs in wide gamut with and without conversion, print JSON."""
    cv2.setNumThreads(1)
    served = load_model_set(model_set)
    networks = Networks(served, ["INT8"], num_threads=1)
    ids = served.class_ids or served.labels
    files = [(ids.index(p.parent.name), p) for p in sorted(photos.glob("*/*")) if p.is_file()]
    result = {
        "machine": {**describe(), "opencv": cv2.__version__, "pillow": PIL.__version__},
        "set": served.name,
        "fingerprint": served.fingerprint("INT8"),
        "littlecms": ImageCms.core.littlecms_version,
        "jpeg_quality": QUALITY,
        **{name: compared(networks, served.manifest.inputs, files, name) for name in PROFILES},
    }
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
