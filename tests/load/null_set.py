"""A model set whose networks cost nothing, and small photos: ``python tests/load/null_set.py DIR``.

What is left of a request's price then is the server. The set has the bundled one's members, labels
and input size; its networks answer a constant. ``tandem serve --model-set DIR/set`` serves it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import cv2
import machine  # noqa: F401 (makes tests.support importable)
import numpy as np
import openvino as ov
import typer
from openvino import opset13 as ops

from app.bench.load import drawn_photos, photos_in
from calibration.sets.transaction import write_manifest
from models.manifest import Manifest, MemberRecord
from models.model_set import load_model_set
from models.record import FileRecord
from tests.support.tiny_networks import record_golden, save_model

SHORTER = 160  # px: with it a photo can have 10 KB and be larger than the networks' input
MAX_BYTES = 10_000
QUALITIES = range(95, 5, -5)


def main(
    folder: Annotated[Path, typer.Argument(help="new; gets set/ and photos/")],
    photos: Annotated[Path | None, typer.Option(help="made small; none: drawn ones")] = None,
) -> None:
    """Write both."""
    write_null_set(folder / "set")
    (folder / "photos").mkdir()
    for index, body in enumerate(small_photos(photos_in(photos) if photos else drawn_photos(32))):
        (folder / "photos" / f"{index:03}.jpg").write_bytes(body)


def write_null_set(folder: Path, name: str = "imagenette") -> Path:
    """Write the set ``name`` anew, with networks that answer a constant."""
    source = load_model_set(name)
    manifest = source.manifest
    folder.mkdir(parents=True)
    (folder / "labels.txt").write_text("\n".join(source.labels) + "\n", "utf-8")
    members = []
    for index, member in enumerate(manifest.members):
        model = constant_model(manifest.image.input_size, manifest.num_classes, index)
        networks = {"INT8": save_model(model, folder, member.name)}
        members.append(MemberRecord(name=member.name, source="a constant", networks=networks))
    written = Manifest(
        name="null",
        description="A constant answer, to measure a server with",
        image=manifest.image,
        num_classes=manifest.num_classes,
        labels=FileRecord.of(folder, "labels.txt"),
        members=tuple(members),
    )
    write_manifest(folder, written)
    record_golden(folder)
    return folder


def constant_model(size: int, num_classes: int, best: int) -> ov.Model:
    """u8 [?,size,size,3] -> always the same probabilities; of the image one pixel is read."""
    pixels = ops.parameter([-1, size, size, 3], ov.Type.u8, name="pixels")
    first = ops.slice(
        pixels, np.array([0, 0]), np.array([1, 1]), np.array([1, 1]), np.array([1, 2])
    )
    zeros = ops.multiply(ops.convert(first, "f32"), np.float32(0))  # (N, 1, 1, 3)
    one = ops.reduce_sum(zeros, np.array([1, 2, 3]), keep_dims=False)  # (N,)
    row = np.full(num_classes, 0.5 / (num_classes - 1), np.float32)
    row[best] = 0.5
    return ov.Model([ops.add(ops.unsqueeze(one, 1), row)], [pixels], "constant")


def small_photos(bodies: Sequence[bytes]) -> list[bytes]:
    """Return the photos as JPEGs of at most 10 KB."""
    return [_small(cv2.imdecode(np.frombuffer(body, np.uint8), 1)) for body in bodies]


def _small(image: np.ndarray) -> bytes:
    scale = SHORTER / min(image.shape[:2])
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    for quality in QUALITIES:
        data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
        if len(data) <= MAX_BYTES:
            break
    return data


if __name__ == "__main__":
    typer.run(main)
