"""A request: its headers' form, its options and body, their checks, the cache in this process.

HTTP and gRPC make the same request, so that the checks are equal for both. The cache keeps answers,
and shares computations under way: several requests with the same image compute it once.
"""

import asyncio
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from app.access import ANYONE, Caller
from app.answers import Classified, Fault
from app.environment import HAPROXY_SECRET, environment_value, has_haproxy
from app.errors import (
    INTERNAL_HEADERS,
    MAX_SHOWN,
    SECRET_HEADER,
    BadParameterError,
    NotOfferedError,
)
from app.graph.redis_cache import Outcome, RedisStore, Rows
from app.queueing.scheduler import Lane
from app.telemetry.metrics import RequestObserver
from models.ensemble import PlanName
from models.image_geometry import PictureRegion, regions_of
from models.network import Pixels

Text = TypeVar("Text", str, bytes)
KEY_HEADER = "authorization"


class NormalForm(Generic[Text]):
    """The form of a request's headers, or of gRPC's metadata, before anything reads them.

    Names are lower-case, as servers hand them over. Of a repeated header the first counts, unless
    its values are a list. Trailers of a body are no headers (:mod:`app.serve.replica`).

    Internal headers stay if HAProxy sent them, as the run's secret shows. Without HAProxy none
    stays. A cluster's HAProxy may have no secret. There all stay: it removes the clients' own, and
    the network must keep others from the Gateways' ports.

    Args:
        encode: makes a header's name of text, in the form in which this protocol has names.
    """

    def __init__(self, encode: Callable[[str], Text]) -> None:
        self._key: Text = encode(KEY_HEADER)
        self._secret_name: Text = encode(SECRET_HEADER)
        self._special: set[Text] = {encode(name) for name in (KEY_HEADER, *INTERNAL_HEADERS)}
        secret = environment_value(HAPROXY_SECRET) if has_haproxy() else None
        self._secret = secret.encode() if secret else None
        self._believes_all = has_haproxy() and not secret

    def of(self, sent: Iterable[tuple[Text, Text]]) -> tuple[list[tuple[Text, Text]], list[Text]]:
        """Return the headers to read, and the values of Authorization."""
        kept: list[tuple[Text, Text]] = []
        internal: list[tuple[Text, Text]] = []
        keys: list[Text] = []
        secrets: list[Text] = []
        for pair in sent:
            if (name := pair[0]) not in self._special:
                kept.append(pair)
            elif name == self._key:
                keys.append(pair[1])
            elif name == self._secret_name:
                secrets.append(pair[1])
            else:
                internal.append(pair)
        if internal and (self._believes_all or self._is_haproxys(secrets)):
            kept += internal
        return kept, keys

    def _is_haproxys(self, secrets: list[Text]) -> bool:
        if self._secret is None or len(secrets) != 1:
            return False
        (sent,) = secrets
        return hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._secret)


RequestAnswers = list[Classified | Fault]  # one per file, or per region, in order
Regions = tuple[PictureRegion, ...]


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """Options of a request of tensors, whose answers carry the probability of every class."""

    pixels: Pixels | None = None  # (N, H, W, 3) uint8 BGR, decoded already, in place of files
    member: str | None = None  # ask this member alone; None: the ensemble
    version: str | None = None  # the fingerprint of the version that must answer; None: any
    classes_of: str | None = None  # the fingerprint whose order of classes rows have; None: own


class RequestOptions(NamedTuple):
    """The options in a request's headers and query; None for an option that is not there."""

    request_id: str
    top_k: int | None = None
    timeout_s: float | None = None  # can only shorten the settings' time limit
    priority: str | None = None  # the Priority header (RFC 9218)
    refused_before: str | None = None  # HAProxy's header: how many requests it refused itself
    cache_control: str | None = None  # the header, for a cache if there is one
    threshold: float | None = None  # of a multi-label set's scores
    model_set: str | None = None  # by name; None: the first that is served
    traffic_key: str | None = None  # the value of the setting traffic_header's header
    plan: str | None = None  # full or fast; None: the settings' plan
    has_set: bool = False  # whether the answers have answer sets
    regions: Regions = ()  # of the only file, which are answered in its place
    embedding: str | None = None  # the member whose pooled features the answers have
    caller: Caller = ANYONE  # by its key, or by its address


IN_BODY = ("top_k", "timeout_s", "priority", "threshold", "plan", "has_set", "regions", "embedding")


class RequestBody(NamedTuple):
    """The content of a request's body: the images, and options that override the headers'."""

    files: list[bytes]
    top_k: int | None = None
    timeout_s: float | None = None  # from the request's arrival; can only shorten the limit
    priority: str | None = None
    tensors: "TensorRequest | None" = None
    threshold: float | None = None
    model_set: str | None = None  # for interfaces whose options cannot name it
    plan: str | None = None
    has_set: bool | None = None
    regions: Regions | None = None
    embedding: str | None = None

    def options(self, options: RequestOptions) -> RequestOptions:
        """Return ``options`` with those of the body in their place; unchanged if it has none."""
        sent = {name: value for name in IN_BODY if (value := getattr(self, name)) is not None}
        return options._replace(**sent) if sent else options


class AnswerListener(Protocol):
    """Gets a notice of each answer, and must not delay it."""

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Record a request's files and their answers, in order."""


# use: read and store; renew: store, do not read (no-cache); off: neither (no-store).
CacheUse = Literal["use", "renew", "off"]


class ClassifyRequest(NamedTuple):
    """The files of a request, the options for its answers, and its clock."""

    files: list[bytes]
    top_k: int
    timeout_s: float  # from its arrival, the upload included
    request_id: str
    observer: RequestObserver
    lane: Lane = "interactive"
    plan: PlanName = "full"  # a set without a usable fast plan answers by full
    reason: str | None = None  # why the service chose the plan itself
    has_set: bool = False  # whether answers have answer sets
    regions: Regions = ()  # of the only file
    embedding: str | None = None  # the member whose pooled features answers have
    is_probe: bool = False  # a probe of the service itself: not in metrics, nor in the cache
    tensors: TensorRequest | None = None
    cache_use: CacheUse = "use"
    threshold: float | None = None  # of a multi-label set's scores; None: the set's own
    traffic_key: str | None = None  # the caller's, if a header chooses the version
    caller: Caller = ANYONE

    @property
    def num_images(self) -> int:
        """How many answers the request has."""
        if self.tensors is None or self.tensors.pixels is None:
            return len(self.regions or self.files)
        return len(self.tensors.pixels)

    @property
    def is_of_files(self) -> bool:
        """Whether whole files go to the whole ensemble; a request of pixels has no files."""
        if not self.files or self.regions:
            return False
        return self.tensors is None or self.tensors.member is None

    @property
    def left_s(self) -> float:
        """The time that is left, in s; negative once it is over."""
        return self.timeout_s - self.observer.elapsed_s()

    def forwarded(self) -> "ClassifyRequest":
        """Return a copy for another Gateway, whose time limit is the time that is left."""
        return self._replace(timeout_s=self.left_s, observer=RequestObserver())


TIMEOUT_HEADER = "x-request-timeout-seconds"
# RFC 9218: urgency 0 to 7, by default 3; other parameters (incremental) are ignored.
URGENCY = re.compile(r"(?:^|,)\s*u\s*=\s*(\d+)\s*(?:;|,|$)")
DEFAULT_URGENCY = 3


def checked_top_k(top_k: int, num_classes: int) -> int:
    """Return ``top_k`` if it is 1 to ``num_classes``, or raise :class:`BadParameterError`."""
    if not 1 <= top_k <= num_classes:
        raise BadParameterError(
            f"top_k is {str(top_k)[:MAX_SHOWN]}; this model set has {num_classes} classes: "
            f"ask for 1 to {num_classes}"
        )
    return top_k


def checked_threshold(threshold: float | None, *, is_multi_label: bool) -> float | None:
    """Return the threshold if it is valid, None for the set's own.

    Raises:
        BadParameterError: it is not between 0 and 1, or the set is not multi-label.
    """
    if threshold is None:
        return None
    shown = str(threshold)[:MAX_SHOWN]
    if not is_multi_label:
        raise BadParameterError(
            f"threshold is {shown}; the classes of this model set exclude each other: leave it out "
            "and ask for top_k classes (a multi-label set has a threshold, see /v1/models)"
        )
    if not 0 < threshold < 1:
        raise BadParameterError(f"threshold is {shown}; give a score above 0 and below 1")
    return threshold


def parsed_regions(sent: object) -> Regions:
    """Return a request's regions; raise :class:`BadParameterError` if it is not their form."""
    try:
        return regions_of(sent)
    except ValueError as error:
        raise BadParameterError(f"{error}; see /docs") from error


def checked_plan(plan: str, allowed: Sequence[PlanName], problem: str | None) -> PlanName:
    """Return a request's plan if the operator allows it and the set has it.

    ``problem`` says why the set has no fast plan.

    Raises:
        BadParameterError: it is no plan.
        NotOfferedError: the operator does not allow it, or the set does not have it.
    """
    for name in allowed:
        if name == plan:
            if name == "fast" and problem is not None:
                raise NotOfferedError(f"plan is fast, and {problem}; ask for plan=full meanwhile")
            return name
    if plan in ("full", "fast"):
        raise NotOfferedError(
            f"plan is {plan}, which this service does not allow (setting allowed_plans): leave it "
            f"out, or ask for {allowed[0]}"
        )
    raise BadParameterError(f"plan is {plan[:MAX_SHOWN]!r}; give full or fast")


def parse_timeout_s(text: str) -> float:
    """Return the client's time limit in seconds.

    Raises:
        BadParameterError: the text is not a number above 0.
    """
    try:
        seconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadParameterError(
            f"{TIMEOUT_HEADER} is {text[:MAX_SHOWN]!r}; give seconds as a number above 0"
        )
    return seconds


def lane_of(priority: str | None, num_images: int) -> Lane:
    """Return a request's lane: bulk for several images, unless a Priority header decides.

    Raises:
        BadParameterError: the header's urgency is not 0 to 7 (RFC 9218).
    """
    match = URGENCY.search(priority) if priority else None
    if match is None:
        return "bulk" if num_images > 1 else "interactive"
    urgency = int(match[1][:3])
    if urgency > 7:
        raise BadParameterError(f"priority is {priority[:40]!r}; its urgency u is 0 to 7")  # type: ignore[index]
    return "interactive" if urgency <= DEFAULT_URGENCY else "bulk"


CACHE_CONTROL = "cache-control"
# Memory of stored rows besides their values: key, array, tuple, place in the table
# (tests/unit/graph/test_request.py).
ENTRY_BYTES = 512


class RowStore:
    """Rows by key, in at most ``max_bytes`` with their overhead; evicts the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.num_evicted = max_bytes, 0, 0
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()  # the most recently used last

    def get(self, key: bytes) -> Rows | None:
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: bytes, rows: Rows) -> None:
        """Store rows in place of earlier ones; rows larger than the whole store are not stored."""
        if (old := self._rows.pop(key, None)) is not None:
            self.num_bytes -= old.nbytes + ENTRY_BYTES
        if (num_bytes := rows.nbytes + ENTRY_BYTES) > self.max_bytes:
            return
        self._rows[key] = rows
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, evicted = self._rows.popitem(last=False)
            self.num_bytes -= evicted.nbytes + ENTRY_BYTES
            self.num_evicted += 1


class ImageFlight:
    """A computation that requests share. ``value`` is its result once it has ended, or None.

    If ``value`` is None, ``was_answered`` says whether the computing request still got an answer,
    which holds for it alone (a member had too little time). Otherwise it failed or was cancelled,
    and another request should compute. ``ended`` wakes all waiters, in the order of their arrival.
    """

    __slots__ = ("ended", "key", "lane", "value", "was_answered")

    def __init__(self, key: bytes, lane: Lane) -> None:
        self.key, self.lane = key, lane
        self.value: Outcome | Fault | None = None
        self.was_answered = False
        self.ended = asyncio.Event()


class ResponseCache:
    """Keeps rows by key, at most ``max_bytes`` of memory; for one event loop.

    Rows that are missing are looked up in ``shared``, if there is one, and new rows are written
    there. ``store`` is memory shared with other caches, in place of an own one of ``max_bytes``.
    """

    def __init__(
        self, max_bytes: int, shared: RedisStore | None = None, store: RowStore | None = None
    ) -> None:
        self._shared = shared
        self._store = RowStore(max_bytes) if store is None else store
        self._flights: dict[bytes, ImageFlight] = {}  # the computations under way

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def take_evicted(self) -> int:
        """Return the number of images evicted since the last call."""
        number, self._store.num_evicted = self._store.num_evicted, 0
        return number

    def read(self, key: bytes) -> Rows | None:
        return self._store.get(key)

    def join(self, key: bytes, lane: Lane) -> tuple[ImageFlight, bool]:
        """Return the computation of a key's rows, and whether it is new.

        The caller must run a new one, and :meth:`end` it in every case. A request in the lane
        ``interactive`` does not wait for a computation in ``bulk``, which interactive requests
        overtake. It computes itself, and later requests wait for it.
        """
        under_way = self._flights.get(key)
        if under_way is not None and (under_way.lane == "interactive" or lane == "bulk"):
            return under_way, False
        own = self._flights[key] = ImageFlight(key, lane)
        return own, True

    def keep(self, key: bytes, rows: Rows) -> None:
        """Keep an image's rows, which must not be changed afterwards."""
        self._store.put(key, rows)
        if self._shared is not None:
            self._shared.write(key, rows)

    async def fetch(self, flights: Mapping[int, ImageFlight | None]) -> dict[int, Rows]:
        """Return rows from the shared store for computations of the caller, by their numbers.

        It ends the computations for which there are rows. It skips entries that are None.
        """
        wanted = {number: flight for number, flight in flights.items() if flight is not None}
        if self._shared is None or not wanted:
            return {}
        shared = await self._shared.read([flight.key for flight in wanted.values()])
        fetched = {}
        for (number, flight), rows in zip(wanted.items(), shared, strict=True):
            if rows is not None:
                fetched[number] = rows
                self._store.put(flight.key, rows)
                self.end(flight, Outcome(rows))
        return fetched

    def end(
        self, flight: ImageFlight, outcome: Outcome | Fault | None = None, *, answered: bool = False
    ) -> None:
        """End a computation that the caller ran, and notify the requests that wait for it.

        Args:
            flight: the computation; if it has ended, nothing happens.
            outcome: its result; None: there is no result that other requests may use.
            answered: without an outcome, whether the caller's request was answered. If so, all
               waiting requests compute for themselves; otherwise the first of them takes over.
        """
        if flight.ended.is_set():
            return
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.value, flight.was_answered = outcome, answered
        flight.ended.set()


def cache_use_of(cache_control: str | None) -> CacheUse:
    """Return how a client allows the cache to be used; unknown directives are ignored."""
    if not cache_control:
        return "use"
    parts = cache_control.lower().split(",")
    directives = {part.partition("=")[0].strip() for part in parts}
    if "no-store" in directives:
        return "off"
    return "renew" if "no-cache" in directives else "use"
