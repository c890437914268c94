"""Samples of live images: chosen among the answers, and written to a folder or an object store.

A sample is the file of an image as its client sent it, and the answer to it. No answer waits for a
sample or fails because of it: samples have a thread of their own, and a full queue drops them.
Samples are erased by id in all Gateways, which the book of the deployment ``Samples`` tells, and
when they are older than ``sample_days``.
"""

import asyncio
import hashlib
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import orjson

from app.answers import Classified, Fault, answer_values
from app.environment import MIB
from app.errors import ConfigError
from app.graph.hub_link import Book, HubLink
from app.queueing.overload import CircuitBreaker
from app.setting_groups import RecordSettings
from app.telemetry.metric_table import SAMPLES
from app.telemetry.metrics import meter
from models.files import make_folder, write_whole
from models.image_files import name_format
from models.machine import installed_version, pip_install
from models.stores import CLIENTS, EXTRAS, files_below, is_url, remove_file, said, smart_open_file

DIGEST_BYTES = 8
SUFFIXES = {"jpeg": "jpg", "HEIF": "heic", None: "bin"}  # other formats: their name
DISAGREES = "disagrees"  # the key of another version's answer
DISAGREEMENTS = "disagreements"  # a subfolder of sample_dir
DISAGREEMENT_SHARE = 0.25  # of sample_mib, if versions share the traffic
MAX_WAITING, MAX_WAITING_BYTES = 256, 64 * MIB
logger = logging.getLogger("ray.serve")
PARTS = 128  # A Gateway lists the folder again after it wrote this part of the limit.
OWN_FILE = re.compile(r"\.?(?P<stem>\d{8}T\d{12}-[0-9a-f]{16})\.[a-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Sample:
    """Two files of the same stem: the image, and the answer as JSON."""

    stem: str  # begins with the time, so that names are in the order of arrival
    suffix: str
    image: bytes
    text: bytes

    @property
    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Names and contents; the image first, so that it exists when the answer's file does."""
        return (f"{self.stem}.{self.suffix}", self.image), (f"{self.stem}.json", self.text)

    @property
    def num_bytes(self) -> int:
        return len(self.image) + len(self.text)


def digest(request_id: str, place: int) -> bytes:
    """Return a hash of an image's request id and its place in the request."""
    return hashlib.blake2b(f"{place} {request_id}".encode(), digest_size=DIGEST_BYTES).digest()


def is_chosen(request_id: str, place: int, ratio: float) -> bool:
    """Whether an image is sampled, by its hash: ``ratio`` of all are, in every process the same."""
    return int.from_bytes(digest(request_id, place)) < ratio * (1 << 8 * DIGEST_BYTES)


def sample_of(
    image: bytes, answer: Classified, place: int, when: datetime, other: Classified | None = None
) -> Sample:
    """Return the sample of the ``place``-th image of a request, answered at ``when``.

    The answer is as the client got it, with as many classes as the client asked for. ``other`` is
    the answer to a copy by a version that disagrees.
    """
    when = when.astimezone(UTC)
    stem = f"{when:%Y%m%dT%H%M%S%f}-{digest(answer.request_id, place).hex()}"
    suffix = suffix_of(image)
    content = {
        "file": f"{stem}.{suffix}",
        "time": when.isoformat(timespec="milliseconds"),
        "image": place,
        **_without_timings(answer),
    }
    if other is not None:
        content[DISAGREES] = _without_timings(other)
    return Sample(stem, suffix, image, orjson.dumps(content))


def suffix_of(image: bytes) -> str:
    """Return the end of an image's file name, by its content."""
    kind = name_format(memoryview(image))
    return SUFFIXES.get(kind) or str(kind).lower()


def _without_timings(answer: Classified) -> dict[str, object]:
    values = answer_values(answer)
    del values["timings_ms"]
    return values


class WaitingSample(NamedTuple):
    """A sampled image that waits to be written."""

    image: bytes
    answer: Classified
    place: int
    when: datetime
    other: Classified | None = None  # of a version that disagrees


def record_sample(result: str) -> None:
    """Count a sampled image by its result: written, dropped or failed."""
    meter.count(SAMPLES, result=result)


Chosen = Callable[[str], bool]  # whether the sample of a stem is meant


class SamplePlace(Protocol):
    """A folder or store that samples are written to."""

    def write(self, sample: Sample) -> bool:
        """Write a sample; return False if there is no room for it."""

    def erase(self, is_meant: Chosen) -> set[str]:
        """Remove the samples that are meant; return their stems."""


@dataclass
class Erased:
    """The ids that were erased, so that nothing of them is written afterwards."""

    ids: set[str] = field(default_factory=set)
    writing: threading.Lock = field(default_factory=threading.Lock)  # to look up and write a sample


class Sampler:
    """Writes ``ratio`` of the answered images, with their answers, to ``place``."""

    def __init__(
        self,
        ratio: float,
        place: SamplePlace,
        observe: Callable[[str], None] = record_sample,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        erased: Erased | None = None,
    ) -> None:
        self._ratio, self._place, self._observe, self._now = ratio, place, observe, now
        self._erased = erased or Erased()
        self._waiting: deque[WaitingSample] = deque()
        self._num_bytes = 0  # of the images that wait
        self._breaker = CircuitBreaker()
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="samples", daemon=True).start()

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Queue the request's sampled images; images answered with an error are left out.

        ``files`` and ``answers`` are in the same order; ``files`` is empty if the client sent
        pixels.
        """
        for place, (image, answer) in enumerate(zip(files, answers, strict=False)):
            if isinstance(answer, Classified) and is_chosen(request_id, place, self._ratio):
                self._take(WaitingSample(image, answer, place, self._now()))

    def note_disagreement(
        self, image: bytes, answer: Classified, other: Classified, place: int
    ) -> None:
        """Take an image that another version answers differently; ``place``: in its request."""
        self._take(WaitingSample(image, answer, place, self._now(), other))

    def _take(self, chosen: WaitingSample) -> None:
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING
            if is_full or self._num_bytes + len(chosen.image) > MAX_WAITING_BYTES:
                self._observe("dropped")
                return
            self._waiting.append(chosen)
            self._num_bytes += len(chosen.image)
            self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                chosen = self._waiting.popleft()
                self._num_bytes -= len(chosen.image)
            self._observe(self._write(chosen))

    def _write(self, chosen: WaitingSample) -> str:
        """Write a sample and return the result; after failures the place is tried less often."""
        if not self._breaker.allows():
            return "failed"
        try:
            sample = sample_of(*chosen)
            with self._erased.writing:
                is_erased = not self._erased.ids.isdisjoint((sample.stem, chosen.answer.request_id))
                is_kept = not is_erased and self._place.write(sample)
        except Exception as error:
            if self._breaker.failed():
                logger.error(
                    "cannot write samples (%s: %s); requests are answered without, and writing is "
                    "retried from time to time",
                    *(type(error).__name__, error),
                )
            return "failed"
        if self._breaker.succeeded():
            logger.info("samples can be written again")
        return "written" if is_kept else "dropped"


def sampler_of(
    records: RecordSettings, erased: Erased | None = None, *, has_versions: bool = False
) -> Sampler | None:
    """Return the sampler that the settings ask for; None if they ask for none."""
    if records.sample_dir is None or records.sample_ratio == 0:
        return None
    share = 1 - DISAGREEMENT_SHARE if has_versions else 1
    place = place_of(records.sample_dir, int(share * records.sample_mib * MIB))
    return Sampler(records.sample_ratio, place, erased=erased)


def disagreement_sampler_of(
    records: RecordSettings, erased: Erased | None = None
) -> Sampler | None:
    """Return the sampler of photos that versions disagree on; None: they are not kept."""
    if records.sample_dir is None:
        return None
    most = int(DISAGREEMENT_SHARE * records.sample_mib * MIB)
    return Sampler(0.0, place_of(_disagreements(records.sample_dir), most), erased=erased)


def _disagreements(place: str) -> str:
    return f"{place.rstrip('/')}/{DISAGREEMENTS}"


class SampleFolder:
    """A folder that holds at most ``max_bytes`` of samples, those of other processes included.

    Files that are no samples are neither counted nor removed.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._left = 0  # bytes that may be written before the folder is listed again

    def write(self, sample: Sample) -> bool:
        """Write a sample, and remove the oldest ones to make room for it.

        Return False if it is larger than the limit. Raises :class:`OSError` if the folder cannot be
        written, or the disk is full.
        """
        if sample.num_bytes > self._max_bytes:
            return False
        left, self._left = self._left, 0  # so that the folder is listed again after a failure
        if sample.num_bytes > left:
            left = self._make_room(max(sample.num_bytes, self._max_bytes // PARTS))
        for name, content in sample.files:
            write_whole(self._folder / name, content, mode=0o600)  # private photos
        self._left = left - sample.num_bytes
        return True

    def erase(self, is_meant: Chosen) -> set[str]:
        """Remove the samples that are meant, the answer first; return their stems."""
        stems = set[str]()
        if self._folder.is_dir():
            for path in sorted(self._folder.iterdir(), key=lambda path: path.suffix != ".json"):
                if (own := OWN_FILE.fullmatch(path.name)) and is_meant(own["stem"]):
                    path.unlink(missing_ok=True)
                    stems.add(own["stem"])
        return stems

    def _make_room(self, room: int) -> int:
        """Remove the oldest samples until ``room`` bytes are free; return ``room``."""
        make_folder(self._folder, mode=0o700)  # private photos
        sizes: dict[str, int] = {}
        files: dict[str, list[Path]] = {}
        for path in self._folder.iterdir():
            if own := OWN_FILE.fullmatch(path.name):
                files.setdefault(own["stem"], []).append(path)
                sizes[own["stem"]] = sizes.get(own["stem"], 0) + _num_bytes(path)
        total = sum(sizes.values())
        for stem in sorted(files):
            if total + room <= self._max_bytes:
                break
            for path in sorted(files[stem], key=lambda path: path.suffix != ".json"):
                path.unlink(missing_ok=True)  # another Gateway may have removed it
            total -= sizes[stem]
        return room


class SampleStore:
    """An object store, by URL; this process writes at most ``max_bytes`` a day (UTC) to it.

    No sample is removed to make room.
    """

    def __init__(
        self, url: str, max_bytes: int, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._url, self._max_bytes, self._now = url.rstrip("/"), max_bytes, now
        self._day, self._num_bytes = "", 0

    def write(self, sample: Sample) -> bool:
        """Write a sample to the day's folder; return False if the day's limit is reached.

        Raises :class:`StoreError` if the store cannot be written.
        """
        day = f"{self._now():%Y%m%d}"
        if day != self._day:
            self._day, self._num_bytes = day, 0
        if self._num_bytes + sample.num_bytes > self._max_bytes:
            return False
        for name, content in sample.files:
            target = f"{self._url}/{day}/{name}"
            with said(f"cannot write {target}"), smart_open_file(target, "wb") as opened:
                opened.write(content)
        self._num_bytes += sample.num_bytes
        return True

    def erase(self, is_meant: Chosen) -> set[str]:
        """Remove the samples that are meant, of all days; return their stems.

        Raises :class:`StoreError` if the store cannot be listed, or a file not be removed.
        """
        stems = set[str]()
        for url in files_below(self._url):
            day, _, name = url.removeprefix(f"{self._url}/").partition("/")
            own = OWN_FILE.fullmatch(name) if day.isdigit() else None
            if own is not None and is_meant(own["stem"]):
                remove_file(url)
                stems.add(own["stem"])
        return stems


def place_of(name: str, max_bytes: int) -> SamplePlace:
    """Return the place with that name: the URL of a store, or a folder."""
    return SampleStore(name, max_bytes) if is_url(name) else SampleFolder(Path(name), max_bytes)


LOOK_EVERY_S, EVERYWHERE_S = 3600.0, 30.0  # for old samples; for all Gateways to erase an id
MAX_ERASED = 10_000  # ids that are remembered, for Gateways that start later
MAX_ID, MAX_REPORTED = 200, 100  # characters; ids whose number of samples is reported


class SampleEraser:
    """Erases samples of this process's folders, or of the store, by ids and by age."""

    def __init__(self, records: RecordSettings, max_files: int, erased: Erased) -> None:
        self._erased, self._max_files = erased, max_files
        name = records.sample_dir
        names = () if name is None else (name, _disagreements(name))
        self._places = [place_of(own, 0) for own in names]
        self._taught = Path(records.teach_dir) if records.teach and records.teach_dir else None
        if self._places and records.sample_days is not None:
            days = timedelta(records.sample_days)
            run = partial(self._keep_young, days)
            threading.Thread(target=run, name="sample days", daemon=True).start()

    def erase(self, ids: Collection[str]) -> Counter[str]:
        """Erase what the ids name; return how many samples and taught photographs each had.

        An id is that of a request, or a sample's file name without its end, or that of a photograph
        that was taught. Raises :class:`OSError` or :class:`StoreError` if something is left.
        """
        named = {digest(own, n).hex(): own for own in ids for n in range(self._max_files)}
        of_samples = {own: own for own in ids}
        with self._erased.writing:
            self._erased.ids |= of_samples.keys()

        def meant(stem: str) -> str | None:
            return of_samples.get(stem) or named.get(stem.rpartition("-")[2])

        removed = Counter[str]()
        for place in self._places:
            removed.update(filter(None, map(meant, place.erase(lambda s: meant(s) is not None))))
        for path in sorted(self._taught.glob("*")) if self._taught is not None else ():
            if (own := meant(path.name.partition(".")[0])) is not None:
                path.unlink(missing_ok=True)
                removed[own] += path.suffix == ".json"
        return removed

    def erase_before(self, when: datetime) -> None:
        """Erase samples of before a time; raises as :meth:`erase` does."""
        oldest = f"{when.astimezone(UTC):%Y%m%dT%H%M%S%f}"
        for place in self._places:
            place.erase(lambda stem: stem < oldest)

    def _keep_young(self, days: timedelta) -> None:
        while True:
            try:
                self.erase_before(datetime.now(UTC) - days)
            except Exception as error:
                logger.error("samples older than sample_days are left: %s", error)
            time.sleep(LOOK_EVERY_S)


@dataclass(slots=True)
class Erasing:
    """What was erased, and how many Gateways have looked for it."""

    id: str
    erased: int  # samples, corrections and taught photographs, in all Gateways
    num_gateways: int
    num_current: int  # the others follow


@dataclass(frozen=True)
class Erasures:
    """The ids that are erased, each with its revision; ``origin`` is that of the settings."""

    origin: str = ""
    ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def revision(self) -> int:
        return max(self.ids.values(), default=0)

    def merged(self, other: Self) -> Self:
        """Return the newest of both."""
        both = {name: max(of, self.ids.get(name, 0)) for name, of in other.ids.items()}
        newest = sorted({**self.ids, **both}.items(), key=lambda own: (own[1], own[0]))
        return replace(self, ids=dict(newest[-MAX_ERASED:]))


class SampleBook(Book[Erasures, Mapping[str, int]]):
    """Knows which ids are erased, and how many samples each Gateway removed for it."""

    def erase(self, sample_id: str) -> int:
        """Have an id erased by all Gateways; return the revision."""
        revision = self.facts.revision + 1
        self.facts = self.facts.merged(Erasures(ids={sample_id: revision}))
        return revision

    def count(self, sample_id: str) -> int:
        """Return how many samples of an id the Gateways removed."""
        return sum(removed.get(sample_id, 0) for _, _, removed in self._reports.values())


class SharedSamples(HubLink):
    """Erases samples here and at all other Gateways."""

    def __init__(self, handle: Any, eraser: SampleEraser) -> None:
        super().__init__(handle, "Samples")
        self._eraser, self._facts = eraser, Erasures()
        self._done: dict[str, int] = {}  # by id: the revision that was erased here
        self._removed: dict[str, int] = {}  # by id, the last ones
        self._turn = asyncio.Lock()

    async def erase(self, sample_id: str) -> Erasing:
        """Erase an id; raise :class:`NotReadyError` if the deployment does not answer."""
        await self._exchange()  # the deployment may have begun anew
        revision: int = await self.call("erase", sample_id)
        revisions = await self._everywhere(revision, EVERYWHERE_S)
        number: int = await self.call("count", sample_id)
        current = sum(own >= revision for own in revisions)
        return Erasing(sample_id, number, len(revisions), current)

    async def _exchange(self) -> None:
        async with self._turn:
            facts, open_ids = self._facts, self._open()
            serves = min((n - 1 for n in open_ids.values()), default=facts.revision)
            asked = self._gateway, facts, dict(self._removed), serves
            if (newest := await self.call("report", *asked)) is not None:
                self._facts = self._facts.merged(newest)
            if open_ids := self._open():
                self._removed |= await asyncio.to_thread(self._eraser.erase, [*open_ids])
                self._done |= open_ids
                self._removed = dict([*self._removed.items()][-MAX_REPORTED:])

    def _open(self) -> dict[str, int]:
        return {own: n for own, n in self._facts.ids.items() if n > self._done.get(own, 0)}


def check_sample_store(place: str | None) -> None:
    """Raise :class:`ConfigError` if ``place`` is a store whose package is missing."""
    scheme = (place or "").partition("://")[0]
    if scheme in EXTRAS and installed_version(CLIENTS[scheme]) is None:
        needed = pip_install(EXTRAS[scheme])
        raise ConfigError(f"sample_dir is {place}, and its client is not installed: {needed}")


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
