"""An evaluation made in code: a tiny set, what its members said, and the figures of it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from calibration.datasets import Dataset, LabelledImage
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.live import LiveResult
from calibration.evaluation.report import as_json, record_of
from models.ensemble import average
from models.manifest import ENSEMBLE, read_manifest
from models.model_set import ModelSet
from models.record import FileRecord, Precision
from tests.support.tiny_networks import LABELS, write_tiny_set

HOSTILE = (
    "<script>alert('x')</script>",
    "salt & pepper &amp; <b>",
    "$\\frac$ & $5$",  # as mathtext: a broken fraction
    '[red]tea[/] [/x] ]]> <!-- --> "quoted"',
    "größe 日本",  # letters that matplotlib's own font lacks
)


def model_set_of(folder, labels=LABELS, members=("sure", "unsure"), precisions=("FP16", "INT8")):
    """Return a tiny set with these classes; its float and INT8 networks are the same files."""
    folder.mkdir()
    (folder / "names.txt").write_text("\n".join(labels), "utf-8")
    names = FileRecord.of(folder, "names.txt")
    write_tiny_set(folder, gains=dict.fromkeys(members, 4.0), labels=names, num_classes=len(labels))
    manifest = read_manifest(folder)
    records = tuple(
        m.model_copy(update={"networks": dict.fromkeys(precisions, m.networks["INT8"])})
        for m in manifest.members
    )
    return ModelSet(folder, manifest.model_copy(update={"members": records}))


def measure(
    model_set: ModelSet,
    truth: tuple[int, ...] = (0, 0, 1, 1, 1, 2, 2, 2, 2, 2),
    answer: tuple[int, ...] = (0, 1, 1, 1, 0, 2, 2, 2, 2, 0),
    float_answer: tuple[int, ...] | None = None,
    name: str = "colours/eval",
    notes: tuple[str, ...] = (),
) -> Evaluation:
    """Count one batch in which every member says ``answer``, the last member a little less sure."""
    images = images_of(truth)
    found = Evaluation(Dataset(name, tuple(images), notes), "0" * 64, int8_kernels="kernels")
    answers: dict[Precision, dict[str, np.ndarray]] = {}
    members = model_set.manifest.members
    for precision in members[0].networks:
        said = float_answer or answer if precision == "FP16" else answer
        rows = {
            m.name: rows_of(said, len(model_set.labels), 0.9 - 0.1 * i)
            for i, m in enumerate(members)
        }
        rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
        answers[precision] = rows
        found.float_type[precision] = "f32"
        for m in members:
            found.cpu_ms_per_image.setdefault(m.name, {})[precision] = 1.25
    found.add(AnsweredBatch(images, [], answers, []))
    return found


def images_of(truth: Iterable[int]) -> list[LabelledImage]:
    return [LabelledImage(Path(f"{i}.png"), t) for i, t in enumerate(truth)]


def rows_of(answer: tuple[int, ...], num_classes: int, sure: float) -> np.ndarray:
    rows = np.full((len(answer), num_classes), (1 - sure) / (num_classes - 1), np.float32)
    rows[np.arange(len(answer)), answer] = sure
    return rows


def live_result(**changes) -> LiveResult:
    facts: dict[str, Any] = {
        "num_images": 10,
        "num_right": {ENSEMBLE: 7},
        "num_same": 10,
        "max_difference": 0.001,
    }
    return LiveResult("http://[::1]:8000", **(facts | changes))


def content_of(model_set: ModelSet, measured: Evaluation, live: LiveResult | None = None) -> dict:
    return as_json(model_set.manifest, record_of(model_set, measured), measured, live)
