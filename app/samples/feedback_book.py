"""The feedback book: the latest answers, and the right labels that callers reported for them."""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from app.errors import MAX_SHOWN, BadParameterError, FeedbackExistsError, UnknownRequestError
from app.messages import Fault
from app.responses import Classified
from models.accuracy import wilson_interval

Version = tuple[str, str]  # a model set's name, and its version


class GivenAnswer(NamedTuple):
    """The answer to an image: its first label, or all labels that a multi-label set listed."""

    version: Version
    labels: tuple[str, ...]


class AnsweredRequest(NamedTuple):
    """The answers to a request's images in order; None for an image answered with an error."""

    key: str  # a hash of the request id
    images: tuple[GivenAnswer | None, ...]

    @classmethod
    def of(cls, request_id: str, answers: Sequence[Classified | Fault]) -> "AnsweredRequest":
        return cls(_key(request_id), tuple(map(_answer_of, answers)))


def _key(request_id: str) -> str:
    """Return a hash of the id, of fixed length: callers choose ids, and how long they are."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()


def _answer_of(answer: Classified | Fault) -> GivenAnswer | None:
    if isinstance(answer, Fault):
        return None
    listed = answer.predictions if answer.threshold is not None else answer.predictions[:1]
    labels = tuple(prediction.label for prediction in listed)
    return GivenAnswer((answer.model_set, answer.model_version), labels)


class Judgement(NamedTuple):
    """Whether an answer was right by its feedback; ``is_new`` is False for repeated feedback."""

    answer: GivenAnswer
    is_right: bool
    is_new: bool


@dataclass(slots=True)
class VersionAccuracy:
    """How many of a version's answers with feedback were right."""

    model_set: str
    model_version: str
    feedback: int
    right: int
    accuracy: float
    # Low and high end, 95 %, Wilson. Not a pair: its schema needs prefixItems, not in OpenAPI 3.0.
    interval: Annotated[tuple[float, ...], Field(min_length=2, max_length=2)]


@dataclass(slots=True)
class FeedbackFigures:
    """Accuracy by version, and how many answers the book remembers."""

    versions: list[VersionAccuracy]
    remembered_answers: int
    max_answers: int
    oldest_s: float  # the age of the oldest remembered answer


@dataclass(slots=True)
class _Remembered:
    images: tuple[GivenAnswer | None, ...]
    when: float
    labels: dict[int, str]  # the right labels, by the image's place in the request
    is_ambiguous: bool = False  # another request had the same id and different answers


class FeedbackBook:
    """Remembers the last ``max_answers`` answers, and counts all feedback since it was made."""

    def __init__(self, max_answers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_answers, self._clock = max_answers, clock
        self._requests: OrderedDict[str, _Remembered] = OrderedDict()
        self._num_answers = 0
        self._counts: dict[Version, Counter[bool]] = {}

    def remember(self, requests: Sequence[AnsweredRequest]) -> None:
        """Remember answers; a request with a known id and the same answers changes nothing."""
        now = self._clock()
        for key, images in requests:
            if (before := self._requests.get(key)) is not None:
                before.is_ambiguous |= before.images != images
                continue
            self._requests[key] = _Remembered(images, now, {})
            self._num_answers += len(images)
        while self._num_answers > self._max_answers and len(self._requests) > 1:
            _, oldest = self._requests.popitem(last=False)
            self._num_answers -= len(oldest.images)

    def judge(
        self, request_id: str, label: str, image: int | None, sets: Collection[str]
    ) -> Judgement:
        """Record the right ``label`` of a request's image.

        ``image`` is its place in the request, from 0. ``sets`` are the model sets that have the
        label, and the versions as NAME@VERSION, whose labels may differ. Repeated feedback changes
        nothing.

        Raises:
            UnknownRequestError: the request is not remembered.
            BadParameterError: the request has no such place, the image was answered with an error,
                or its set lacks the label.
            FeedbackExistsError: the image has another label already, or several requests with
                different answers had this id.

        """
        if (request := self._requests.get(_key(request_id))) is None:
            raise UnknownRequestError(self._unknown(request_id))
        if request.is_ambiguous:
            raise FeedbackExistsError(
                f"several requests had the id {request_id[:MAX_SHOWN]!r} and other answers, so "
                "feedback for it is refused; send each request with an X-Request-ID of its own"
            )
        place = _place(image, len(request.images))
        if (answer := request.images[place]) is None:
            raise BadParameterError(f"image {place} of this request was answered with an error")
        if {answer.version[0], "@".join(answer.version)}.isdisjoint(sets):
            raise BadParameterError(
                f"{label[:MAX_SHOWN]!r} is no label of {answer.version[0]}; GET /v1/models lists "
                "its labels"
            )
        before = request.labels.get(place)
        if before not in (None, label):
            raise FeedbackExistsError(
                f"image {place} of this request has the label {before!r} already; the first counts"
            )
        is_right = label in answer.labels
        if before is None:
            request.labels[place] = label
            self._counts.setdefault(answer.version, Counter())[is_right] += 1
        return Judgement(answer, is_right, is_new=before is None)

    def figures(self) -> FeedbackFigures:
        """Return the accuracy of each version that has feedback, and the book's size."""
        versions = [_accuracy(*pair) for pair in sorted(self._counts.items())]
        return FeedbackFigures(
            versions, self._num_answers, self._max_answers, round(self._oldest_s(), 1)
        )

    def _oldest_s(self) -> float:
        oldest = next(iter(self._requests.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.when

    def _unknown(self, request_id: str) -> str:
        return (
            f"no request {request_id[:MAX_SHOWN]!r} is remembered: there are {self._num_answers} "
            f"answers of the last {self._oldest_s():.0f} s, at most {self._max_answers}; send "
            "feedback sooner, or raise feedback_answers"
        )


def _place(image: int | None, num_images: int) -> int:
    """Return the image's place; ``image`` may be None if the request has only one image."""
    if image is None and num_images == 1:
        return 0
    if image is None or not 0 <= image < num_images:
        named = "image is missing" if image is None else f"image is {image}"
        raise BadParameterError(
            f"{named}, and this request has {num_images}: give image from 0 to {num_images - 1}, "
            "in the order of the request's files"
        )
    return image


def _accuracy(version: Version, counts: Counter[bool]) -> VersionAccuracy:
    num, right = counts.total(), counts[True]
    low, high = wilson_interval(right, num)
    interval = round(low, 4), round(high, 4)
    return VersionAccuracy(*version, num, right, round(right / num, 4), interval)
