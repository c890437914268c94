"""A model set's ensemble in this process: the answers of a service that serves the set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibration.datasets.labelled import ImageFile
from calibration.evaluation.inference import Networks, batches, through_threads
from models.accuracy import ENSEMBLE
from models.ensemble import Prediction, Probabilities
from models.errors import ImageError, ModelSetError
from models.golden import check
from models.ledger import judge
from models.model_set import ModelSet, load_model_set
from models.record import Precision

NetworkRows = Mapping[str, Probabilities]  # each member's (N, C), and the ensemble's


@dataclass(frozen=True)
class Answer:
    """What the ensemble says of one image; every list is likeliest first.

    ``sure`` is None where the set does not say when an answer is sure, ``threshold`` unless the set
    is multi-label.
    """

    model_set: str
    model_version: str
    predictions: list[Prediction]
    members: dict[str, list[Prediction]]
    agreement: bool
    sure: bool | None = None
    threshold: float | None = None

    @property
    def label(self) -> str | None:
        """The first label; None where a multi-label set lists none."""
        return self.predictions[0].label if self.predictions else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``/v1/classify``'s answer, without those of a request."""
        values = asdict(self)
        for name, listed in values["members"].items():
            first = {key: listed[0][key] for key in ("label", "probability")} if listed else {}
            values["members"][name] = {**first, "predictions": listed}
        values = {name: value for name, value in values.items() if value is not None}
        return {**values, "degraded": False}


class LocalEnsemble:
    """Classifies images with a set's networks, on every core.

    Raises:
        GoldenMismatchError: a network does not answer on this CPU as where the set was made.
        ModelSetError: a network cannot be loaded, or INT8 lost more accuracy than the set allows.

    """

    def __init__(self, model_set: ModelSet, precision: Precision = "INT8") -> None:
        verdict = judge(model_set.manifest, precision, model_set.argument)
        if verdict.status == "dropped":
            raise ModelSetError(verdict.message)
        self.model_set, self._precision = model_set, precision
        self.model_version = model_set.fingerprint(precision)
        self._rule = model_set.answer_rule
        self._networks = Networks(model_set, [precision])
        if (golden := model_set.golden) is not None:
            for name, network in self._networks.compiled[precision].items():
                check(golden, name, precision, network)

    def classify(
        self, image: bytes | str | Path, top_k: int = 1, threshold: float | None = None
    ) -> Answer:
        """Classify one image: an encoded file's bytes, or its path.

        Raises:
            ImageError: it is no image, damaged, or larger than the limits.
            OSError: there is no such file.

        """
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        rows = self._networks.run(self._networks.read(data)[None])[self._precision]
        return self._answer(rows, 0, top_k, threshold)

    def classify_many(
        self, files: Sequence[Path], top_k: int = 1, threshold: float | None = None
    ) -> Iterator[Answer | ImageError | OSError]:
        """Yield each file's answer, in order; the error of a file that has none.

        A thread for each core takes a batch of 8 files all the way, only a few ahead.
        """

        def answered(batch: Sequence[ImageFile]) -> list[Answer | ImageError | OSError]:
            done = self._networks.answer(batch)
            rows = done.probabilities.get(self._precision, {})
            found: dict[int, Answer | ImageError | OSError] = {
                id(image): error for image, error in done.unreadable
            }
            for place, image in enumerate(done.images):
                found[id(image)] = self._answer(rows, place, top_k, threshold)
            return [found[id(image)] for image in batch]

        images = [ImageFile(path) for path in files]
        for batch in through_threads(answered, batches(images), self._networks.num_threads):
            yield from batch

    def _answer(self, rows: NetworkRows, place: int, top_k: int, threshold: float | None) -> Answer:
        rule = self._rule.asked(threshold)
        members = {name: own[place] for name, own in rows.items() if name != ENSEMBLE}
        mean = rows[ENSEMBLE][place]
        return Answer(
            self.model_set.name,
            self.model_version,
            rule.predictions(mean, top_k),
            {name: rule.predictions(row, top_k) for name, row in members.items()},
            rule.agree(members.values()),
            rule.is_sure(mean),
            rule.threshold,
        )


def load(name: str = "imagenette", precision: Precision = "INT8") -> LocalEnsemble:
    """Load a model set's ensemble by its name, or its folder.

    Raises:
        ModelSetError: there is no such set, or it must not answer here; see the class.

    """
    return LocalEnsemble(load_model_set(name), precision)
