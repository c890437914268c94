"""What people say is right: the book of feedback, and photographs that are taught with a label.

One replica keeps the book for all Gateways. A Gateway collects its answers and sends them a few
times a second, so that no client waits for it. Photographs that are taught lie in a folder of each
node, for ``tandem learn --corrections``.
"""

import asyncio
import hashlib
import logging
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from app.answers import Classified, Fault
from app.environment import MIB
from app.errors import (
    MAX_SHOWN,
    BadParameterError,
    FeedbackExistsError,
    NotReadyError,
    TaughtFullError,
    UnknownRequestError,
)
from app.graph.hub_link import HubHandle
from app.queueing.overload import CircuitBreaker
from app.samples.samples import digest, suffix_of
from app.setting_groups import RecordSettings
from app.telemetry.metric_table import FEEDBACK
from app.telemetry.metrics import meter
from app.telemetry.spans import untraced_task
from models.ensemble import PlanName
from models.errors import TandemError
from models.files import make_folder, write_whole
from models.record import wilson_interval

SEND_EVERY_S = 0.2
ANSWERS_WITHIN_S = 4.0  # before HAProxy asks another Gateway, on a cluster after 5 s
MAX_UNSENT = 10_000  # requests; the oldest beyond it are dropped
logger = logging.getLogger("ray.serve")
Version = tuple[str, str]  # a model set's name, and its version


@dataclass(slots=True)
class VersionAccuracy:
    """How many of a version's answers by a plan were right, of those with feedback."""

    model_set: str
    model_version: str
    plan: PlanName
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


class GivenAnswer(NamedTuple):
    """The answer to an image: its first label, or all labels that a multi-label set listed."""

    version: Version
    labels: tuple[str, ...]
    plan: PlanName = "full"


class Judgement(NamedTuple):
    """Whether an answer was right by its feedback; ``is_new`` is False for repeated feedback."""

    answer: GivenAnswer
    label: str
    is_right: bool
    is_new: bool
    place: int = 0  # of the image in its request


class Feedback(HubHandle):
    """Reports answers and feedback to the book behind ``handle``."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "Feedback")
        self._unsent: deque[AnsweredRequest] = deque(maxlen=MAX_UNSENT)
        self._sending: asyncio.Task[None] | None = None
        self._breaker = CircuitBreaker()

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Report a request's answers to the book soon, without waiting."""
        self._unsent.append(AnsweredRequest.of(request_id, answers))
        if self._sending is None or self._sending.done():
            self._sending = untraced_task(self._send_soon())

    async def judge(
        self, request_id: str, label: str, image: int | None, sets: Mapping[str, str]
    ) -> Judgement:
        """Report the right label of an image; see :meth:`FeedbackBook.judge`.

        Raises:
            TandemError: what that method raises, or the book's replica does not answer.
        """
        asked = request_id, label, image, sets
        async with self.in_time(ANSWERS_WITHIN_S):
            await self._send_now()
            try:
                judgement: Judgement = await self.call("judge", *asked)
            except UnknownRequestError:  # another Gateway may have answered, and not yet reported
                await asyncio.sleep(2 * SEND_EVERY_S)
                judgement = await self.call("judge", *asked)
        if judgement.is_new:
            right = "yes" if judgement.is_right else "no"
            answer = judgement.answer
            meter.count(FEEDBACK, right=right, model_version=answer.version[1], plan=answer.plan)
        return judgement

    async def figures(self) -> FeedbackFigures:
        """Return the accuracy by version; see :meth:`FeedbackBook.figures`."""
        async with self.in_time(ANSWERS_WITHIN_S):
            await self._send_now()
            figures: FeedbackFigures = await self.call("figures")
        return figures

    async def _send_now(self) -> None:
        """Report the unsent answers, of other requests too: all of it if this request ends."""
        await asyncio.shield(untraced_task(self._send()))

    async def _send_soon(self) -> None:
        while self._unsent:
            await asyncio.sleep(SEND_EVERY_S)
            await self._send()

    async def _send(self) -> None:
        """Report the unsent answers; they are dropped if that fails."""
        if not self._unsent or not self._breaker.allows():
            self._unsent.clear()
            return
        requests = list(self._unsent)
        self._unsent.clear()
        try:
            async with self.in_time(ANSWERS_WITHIN_S):
                await self.call("remember", requests)
        except TandemError as error:
            if self._breaker.failed():
                logger.error("answers were not recorded for feedback: %s", error.message)
        else:
            self._breaker.succeeded()


class AnsweredRequest(NamedTuple):
    """The answers to a request's images in order; None for an image answered with an error."""

    key: str  # a hash of the request id
    images: tuple[GivenAnswer | None, ...]

    @classmethod
    def of(cls, request_id: str, answers: Sequence[Classified | Fault]) -> "AnsweredRequest":
        images: list[GivenAnswer | None] = []
        for answer in answers:
            if isinstance(answer, Fault):
                images.append(None)
                continue
            listed = answer.predictions if answer.threshold is not None else answer.predictions[:1]
            labels = tuple(prediction.label for prediction in listed)
            version = answer.model_set, answer.model_version
            images.append(GivenAnswer(version, labels, answer.plan))
        return cls(_key(request_id), tuple(images))


def _key(request_id: str) -> str:
    """Return a hash of the id, of fixed length: callers choose ids, and how long they are."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()


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
        self._counts: dict[tuple[Version, PlanName], Counter[bool]] = {}

    def remember(self, requests: Sequence[AnsweredRequest]) -> None:
        """Remember answers; a request with a known id and the same answers changes nothing."""
        now = self._clock()
        for key, images in requests:
            if (before := self._requests.get(key)) is not None:
                before.is_ambiguous |= _without_plan(before.images) != _without_plan(images)
                continue
            self._requests[key] = _Remembered(images, now, {})
            self._num_answers += len(images)
        while self._num_answers > self._max_answers and len(self._requests) > 1:
            _, oldest = self._requests.popitem(last=False)
            self._num_answers -= len(oldest.images)

    def judge(
        self, request_id: str, label: str, image: int | None, sets: Mapping[str, str]
    ) -> Judgement:
        """Record the right ``label`` of a request's image.

        ``image`` is its place in the request, from 0. ``sets`` has the label that is meant in each
        model set, and in versions as NAME@VERSION, whose labels may differ. Repeated feedback
        changes nothing.

        Raises:
            UnknownRequestError: the request is not remembered.
            BadParameterError: the request has no such place, the image was answered with an error,
                or its set lacks the label.
            FeedbackExistsError: the image has another label already, or several requests with
                different answers had this id.
        """
        if (request := self._requests.get(_key(request_id))) is None:
            raise UnknownRequestError(
                f"no request {request_id[:MAX_SHOWN]!r} is remembered: there are "
                f"{self._num_answers} answers of the last {self._oldest_s():.0f} s, at most "
                f"{self._max_answers}; send feedback sooner, or raise feedback_answers"
            )
        if request.is_ambiguous:
            raise FeedbackExistsError(
                f"several requests had the id {request_id[:MAX_SHOWN]!r} and other answers, so "
                "feedback for it is refused; send each request with an X-Request-ID of its own"
            )
        place = _place(image, len(request.images))
        if (answer := request.images[place]) is None:
            raise BadParameterError(f"image {place} of this request was answered with an error")
        meant = sets.get("@".join(answer.version), sets.get(answer.version[0]))
        if meant is None:
            raise BadParameterError(
                f"{label[:MAX_SHOWN]!r} is no label of {answer.version[0]}, and no id or number of "
                "its classes; GET /v1/models lists its labels"
            )
        label = meant
        before = request.labels.get(place)
        if before not in (None, label):
            raise FeedbackExistsError(
                f"image {place} of this request has the label {before!r} already; the first counts"
            )
        is_right = label in answer.labels
        if before is None:
            request.labels[place] = label
            self._counts.setdefault((answer.version, answer.plan), Counter())[is_right] += 1
        return Judgement(answer, label, is_right, before is None, place)

    def figures(self) -> FeedbackFigures:
        """Return the accuracy of each version and plan with feedback, and the book's size."""
        versions = []
        for (version, plan), counts in sorted(self._counts.items()):
            num, right = counts.total(), counts[True]
            low, high = wilson_interval(right, num)
            interval = round(low, 4), round(high, 4)
            accuracy = round(right / num, 4)
            versions.append(VersionAccuracy(*version, plan, num, right, accuracy, interval))
        return FeedbackFigures(
            versions, self._num_answers, self._max_answers, round(self._oldest_s(), 1)
        )

    def _oldest_s(self) -> float:
        oldest = next(iter(self._requests.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.when


def _without_plan(images: Sequence[GivenAnswer | None]) -> list[tuple[Any, ...] | None]:
    """Return what the answers said: a request that is sent again may get another plan."""
    return [answer and answer[:2] for answer in images]


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


NONE = "none"  # the class of photographs that show none of the others, as tandem learn has it
TAUGHT_FILE = re.compile(r"(?P<name>[0-9a-f]{32}|request-[0-9a-f]{16})\.[a-z0-9]+")
CORRECTION = "request-"


@dataclass(slots=True)
class Taught:
    """A photograph that is kept with its label."""

    id: str  # of its bytes: the same photograph has the same
    label: str
    model_set: str
    before: Annotated[
        str | SkipJsonSchema[None], Field(description="the label that it had before")
    ] = None


@dataclass(slots=True)
class TaughtFigures:
    """What a node's folder of taught photographs has, and may have."""

    photographs: int
    corrections: Annotated[int, Field(description="labels that feedback gave to samples")]
    labels: Annotated[dict[str, int], Field(description="photographs of each label")]
    bytes: int
    max_photographs: int
    max_bytes: int


class TaughtFolder:
    """A folder of photographs with the labels that people gave them, bounded in bytes and number.

    A photograph is a file named by its hash, and a JSON file with its label: if it is taught again,
    the later label counts. A correction is a JSON file alone: the label of a sample, which is found
    by the hash of its request. Nothing is removed to make room, and other files do not count.
    """

    def __init__(self, folder: Path, max_bytes: int, max_photographs: int) -> None:
        self._folder, self._max_bytes, self._most = folder, max_bytes, max_photographs
        self._labels: dict[str, tuple[int, str]] = {}  # by file: when it was written, its label
        self._lock = threading.Lock()

    def keep(self, image: bytes, label: str, model_set: str) -> Taught:
        """Write a photograph and its label.

        Raises:
            TaughtFullError: there is no room for it.
            NotReadyError: the folder cannot be written.
        """
        name = hashlib.sha256(image).hexdigest()[:32]
        content = {"file": f"{name}.{suffix_of(image)}", "label": label, "model_set": model_set}
        with self._lock, _writing(self._folder):
            before = self._label(self._folder / f"{name}.json")
            if before is None:
                self._check_room(len(image))
                write_whole(self._folder / content["file"], image, mode=0o600)  # a private photo
            self._write(name, content)
        return Taught(name, label, model_set, None if before == label else before)

    def correct(self, request_id: str, place: int, label: str, model_set: str) -> bool:
        """Write the label of a request's ``place``-th image; False: there are too many already."""
        of = digest(request_id, place).hex()
        with self._lock, _writing(self._folder):
            if sum(name.startswith(CORRECTION) for name in self._names()) >= self._most:
                return False
            self._write(
                f"{CORRECTION}{of}", {CORRECTION[:-1]: of, "label": label, "model_set": model_set}
            )
        return True

    def figures(self) -> TaughtFigures:
        """Count the photographs by label, and the corrections."""
        with self._lock, _writing(self._folder):
            names = self._names()
            matches = [self._label(self._folder / f"{name}.json") for name in names]
            labels = Counter(
                label
                for name, label in zip(names, matches, strict=True)
                if label is not None and not name.startswith(CORRECTION)
            )
            num = labels.total()
            corrections = sum(name.startswith(CORRECTION) for name in names)
            used = self._num_bytes()
        return TaughtFigures(num, corrections, dict(labels), used, self._most, self._max_bytes)

    def _check_room(self, num_bytes: int) -> None:
        number = sum(not name.startswith(CORRECTION) for name in self._names())
        if number >= self._most:
            raise TaughtFullError(
                f"{number} photographs are kept, of at most {self._most} (teach_photographs): "
                "learn from them (tandem learn NAME --corrections DIR), then move them away"
            )
        if (used := self._num_bytes()) + num_bytes > self._max_bytes:
            raise TaughtFullError(
                f"the photographs that are kept have {used} bytes, this one {num_bytes}, the limit "
                f"is {self._max_bytes} (teach_mib): learn from them, then move them away"
            )

    def _names(self) -> list[str]:
        matches = (TAUGHT_FILE.fullmatch(path.name) for path in self._folder.glob("*.json"))
        return sorted(match["name"] for match in matches if match is not None)

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.iterdir() if path.is_file())

    def _label(self, path: Path) -> str | None:
        """Return the label in a file; None: there is none. Files are read once."""
        try:
            written = path.stat().st_mtime_ns
            if self._labels.get(path.name, (0, ""))[0] != written:
                self._labels[path.name] = written, str(orjson.loads(path.read_bytes())["label"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            self._labels.pop(path.name, None)
            return None
        return self._labels[path.name][1]

    def _write(self, name: str, content: dict[str, str]) -> None:
        content["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        write_whole(self._folder / f"{name}.json", orjson.dumps(content), mode=0o600)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        make_folder(folder, mode=0o700)  # private photos
        yield
    except OSError as error:
        raise NotReadyError(
            f"teach_dir {folder} cannot be used: {error.strerror or error}; requests are answered "
            "as before"
        ) from error


def taught_of(records: RecordSettings) -> TaughtFolder | None:
    """Return the folder that the settings name; None if ``teach`` is off."""
    if not records.teach or records.teach_dir is None:
        return None
    most_bytes = records.teach_mib * MIB
    return TaughtFolder(Path(records.teach_dir), most_bytes, records.teach_photographs)
