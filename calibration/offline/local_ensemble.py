"""A model set's ensemble in this process, with the answers of a service that serves the set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from calibration.datasets import ImageFile
from calibration.evaluation.inference import Networks, batches, through_threads
from models.accuracy import ENSEMBLE
from models.ensemble import Prediction, Probabilities
from models.errors import ImageError, ModelSetError
from models.golden import check
from models.ledger import judge
from models.model_set import ModelSet, load_model_set
from models.record import Precision
from models.user_folders import user_folder

NetworkRows = Mapping[str, Probabilities]  # (N, C) of each member and of the ensemble


@dataclass(frozen=True)
class ImageInMemory(ImageFile):
    """An image whose file was read before, or the error of reading it; it has no path."""

    content: bytes | OSError

    def read_bytes(self) -> bytes:
        if isinstance(self.content, OSError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class Answer:
    """The ensemble's answer for an image; every list has the likeliest class first.

    ``sure`` is None if the set has no bound for sure answers. ``threshold`` is None unless the set
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
        """The first label; None if a multi-label answer lists none."""
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
    """Classifies images with a set's networks on ``num_threads`` cores; None: on all cores.

    Raises:
        GoldenMismatchError: a network's answers on this CPU differ from those when the set was
            made.
        ModelSetError: a network cannot be loaded, or INT8 lost more accuracy than the set allows.

    """

    def __init__(
        self,
        model_set: ModelSet,
        precision: Precision = "INT8",
        num_threads: int | None = None,
    ) -> None:
        verdict = judge(model_set.manifest, precision, model_set.argument)
        if verdict.status == "dropped":
            raise ModelSetError(f"{verdict.message}. Only tandem serve has --allow-unverified")
        self.model_set, self._precision = model_set, precision
        self.model_version = model_set.fingerprint(precision)
        self._rule = model_set.answer_rule
        cache = user_folder(user_cache_path, "openvino")
        self._networks = Networks(model_set, [precision], cache, num_threads)
        if (golden := model_set.golden) is not None:
            for name, network in self._networks.compiled[precision].items():
                check(
                    golden, name, model_set.manifest.member(name).precision_of(precision), network
                )

    def classify(
        self, image: bytes | str | Path, top_k: int = 1, threshold: float | None = None
    ) -> Answer:
        """Classify an image: an encoded file's bytes, or its path.

        Raises:
            ImageError: the file is damaged, not an image, or larger than the limits.
            OSError: the file cannot be read.

        """
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        rows = self._networks.run(self._networks.read(data)[None])[self._precision]
        return self._answer(rows, 0, top_k, threshold)

    def classify_many(
        self,
        files: Sequence[bytes | Path | OSError],
        top_k: int = 1,
        threshold: float | None = None,
    ) -> Iterator[Answer | ImageError | OSError]:
        """Yield for each file, bytes or path, its answer or its error, in order.

        A thread per core handles batches of 8 files, with few batches started ahead.
        """

        def answered(batch: Sequence[ImageFile]) -> list[Answer | ImageError | OSError]:
            done = self._networks.answer(batch)
            rows = done.probabilities.get(self._precision, {})
            outcomes: dict[int, Answer | ImageError | OSError] = {
                id(image): error for image, error in done.unreadable
            }
            for place, image in enumerate(done.images):
                outcomes[id(image)] = self._answer(rows, place, top_k, threshold)
            return [outcomes[id(image)] for image in batch]

        images = [
            ImageFile(file) if isinstance(file, Path) else ImageInMemory(Path(), file)
            for file in files
        ]
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
    """Load a model set's ensemble by name or folder.

    Raises:
        ModelSetError: there is no such set, or it may not answer here; see the class.

    """
    return LocalEnsemble(load_model_set(name), precision)
