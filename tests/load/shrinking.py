"""What shrinking before sending (``shrink=True``) saves in bytes and changes in answers.

    python tests/load/shrinking.py PHOTOS --json FILE

PHOTOS has a folder for each class, by its id. Some of the photographs are also enlarged to 12
megapixels with grain, which makes files of a phone's size. Each file is answered as it is and as
``tandem_client`` sends it with ``shrink=True``, in this process, by the decoder and the networks of
the service. Then the decoder's stages are timed on one thread beside libjpeg-turbo alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import cv2
import numpy as np
import PIL
import typer
from machine import describe, write_result

from calibration.evaluation.inference import BATCH, Networks
from models.image import ImageInputs, ImageRule
from models.model_set import ModelSet, load_model_set
from tandem_client.images import SHRINK_FACTOR, ShrunkFile, shrunk

Labelled = tuple[str, bytes]  # class id, file
BIG_PIXELS, QUALITY, GRAIN = 12e6, 92, 6.0  # grain: standard deviation of 0..255
TIMED, REPEATS = 12, 5
SCALES = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
USUAL = ImageRule(224, 232)  # of most published networks


def photographs(folder: Path) -> list[Labelled]:
    """Return the files below a folder a class."""
    paths = sorted(path for path in folder.glob("*/*") if path.is_file())
    return [(path.parent.name, path.read_bytes()) for path in paths]


def enlarged(photo: Labelled, seed: int) -> Labelled:
    """Return a photograph in 12 megapixels, as JPEG with a camera's grain."""
    class_id, data = photo
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    factor = (BIG_PIXELS / (pixels.shape[0] * pixels.shape[1])) ** 0.5
    assert pixels is not None
    big = cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    grain = np.empty(big.shape, np.int16)
    cv2.setRNGSeed(seed)
    cv2.randn(grain, np.zeros(3), np.full(3, GRAIN))
    grainy = np.clip(big + grain, 0, 255).astype(np.uint8)
    _, file = cv2.imencode(".jpg", grainy, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return class_id, file.tobytes()


def labels(networks: Networks, files: Sequence[bytes]) -> list[int]:
    """Return the ensemble's first class of each of up to 8 files."""
    rows = networks.run(np.stack([networks.read(data) for data in files]))["INT8"]["ensemble"]
    return [int(index) for index in rows.argmax(axis=1)]


def compared(
    model_set: ModelSet, networks: Networks, files: Iterator[Labelled], shorter: int
) -> dict[str, Any]:
    """Answer each file as it is and shrunk; count bytes, equal and right first classes."""
    ids = model_set.class_ids or model_set.labels
    sizes, same, right = [], [], []
    while batch := [file for _, file in zip(range(BATCH), files, strict=False)]:
        sent: list[ShrunkFile] = [shrunk(data, None, shorter) for _, data in batch]
        whole = labels(networks, [data for _, data in batch])
        smaller = labels(networks, [file.data for file in sent])
        for (class_id, data), file, a, b in zip(batch, sent, whole, smaller, strict=True):
            sizes.append((len(data), len(file.data), file.before is not None))
            same.append(a == b)
            right.append((ids[a] == class_id, ids[b] == class_id))
    before, after, was_shrunk = (sum(column) for column in zip(*sizes, strict=True))
    top1 = [sum(column) / len(right) for column in zip(*right, strict=True)]
    return {
        "images": len(same),
        "shrunk": was_shrunk,
        "bytes_before": before,
        "bytes_after": after,
        "smallest_largest_before": [min(s[0] for s in sizes), max(s[0] for s in sizes)],
        "bytes_share": round(after / before, 4),
        "largest_share": round(max(after / before for before, after, _ in sizes), 4),
        "same_first_class": sum(same),
        "top1_before_after": [round(share, 4) for share in top1],
    }


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU ms of this thread for a call."""
    started = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started)


def decoding(files: Sequence[bytes], inputs: ImageInputs) -> dict[str, Any]:
    """Return the CPU-ms of our decoder by stage, and of libjpeg-turbo alone at the same scale.

    The floor is ``cv2.imdecode`` at the reduced scale that the decoder chooses. Both run one after
    the other, in turns; a file's figure is the median of its turns.
    """
    turns = []
    for data in files:
        checked = inputs.check(data)
        buffer = np.frombuffer(data, np.uint8)
        flag = SCALES[checked.reduction] | cv2.IMREAD_IGNORE_ORIENTATION
        rows = [
            (
                cpu_ms(lambda: cv2.imdecode(buffer, flag)),  # noqa: B023 - called at once
                cpu_ms(lambda: inputs.check(data)),  # noqa: B023
                cpu_ms(lambda: inputs.decode(data, checked)),  # noqa: B023
            )
            for _ in range(REPEATS)
        ]
        turns.append([median(column) for column in zip(*rows, strict=True)])
    floor, check, decode = (median(column) for column in zip(*turns, strict=True))
    ratio = median((check + decode) / floor for floor, check, decode in turns)
    return {
        "rule": [[rule.input_size, rule.resize_shorter] for rule in inputs.rules],
        "reduction": inputs.check(files[0]).reduction,
        "floor_cpu_ms": round(floor, 2),
        "check_cpu_ms": round(check, 2),
        "decode_and_resize_cpu_ms": round(decode, 2),
        "of_floor": round(ratio, 3),
    }


def main(
    photos: Annotated[Path, typer.Argument(help="a folder a class, by its id", exists=True)],
    num_enlarged: Annotated[int, typer.Option("--enlarged", help="how many become 12 MP")] = 120,
    model_set: Annotated[str, typer.Option(help="name or folder of the set")] = "imagenette",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write it here")] = None,
) -> None:
    """Answer every photograph as it is and shrunk, time the decoder, print JSON."""
    cv2.setNumThreads(1)
    served = load_model_set(model_set)
    networks = Networks(served, ["INT8"], num_threads=1)
    inputs = served.manifest.inputs
    shorter = SHRINK_FACTOR * max(rule.resize_shorter for rule in inputs.rules)
    small = photographs(photos)
    chosen = small[:: max(1, len(small) // num_enlarged)][:num_enlarged]
    timed = [enlarged(photo, seed)[1] for seed, photo in enumerate(chosen[:TIMED])]
    result = {
        "machine": {**describe(), "opencv": cv2.__version__, "pillow": PIL.__version__},
        "shorter_side_px": shorter,
        "small": compared(served, networks, iter(small), shorter),
        "12_megapixels": compared(
            served, networks, (enlarged(p, seed) for seed, p in enumerate(chosen)), shorter
        ),
        "decoding_12_megapixels": [
            decoding(timed, inputs),
            decoding(timed, ImageInputs({"usual": USUAL})),
        ],
    }
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
