"""One HTTP request (``POST /v1/classify``) and its answer: options, retries, TLS, addresses.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015), in
addition to the service's Retry-After. So clients that were refused together do not return together.
"""

import ipaddress
import json
import math
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

import httpx

from tandem_client.answers import (
    BadAnswer,
    BadImage,
    BrokenOff,
    Classification,
    DeadlineExceeded,
    Outcome,
    Reason,
    Result,
    TandemError,
    Unreachable,
    checked,
    error_of,
    has_error_of,
    outcome_of,
    retry_after_s,
)
from tandem_client.images import (
    DISTRIBUTION,
    Channels,
    Image,
    ShrunkFile,
    __version__,
    files_of,
    images_of,
    path_of,
)

CONNECT_S = 5.0  # longer than any handshake; then another attempt may reach another host
LEAST_SENT_S = 0.001
SHRUNK = "x-tandem-shrunk"  # the sizes that shrunk pictures had
MAX_BROKEN_OFF = 1  # calls that are sent again after a 502
MOST_DOUBLINGS = 60  # of the waits: far beyond any limit, and still a float
MAX_PORT = 65535
_KEY = re.compile(r"[\x21-\x7e]+")  # characters that a header can carry without quoting
_USER_INFO = re.compile(r"(?:(?<=//)|^)[^/?#]*@")
_IS_HTTP = re.compile(r"https?://[^/]", re.IGNORECASE)


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon to retry; ``max_attempts=1`` never retries.

    ``on`` lists the causes: ``overloaded`` (429), ``not_ready`` (503), ``refused`` (no connection),
    ``reset`` (the connection, or a part of the service, ended before the answer). Classifying an
    image again changes nothing in the service, so all of them are safe.
    """

    max_attempts: int = 5
    base_s: float = 0.1  # the first wait is at most this; the maximum doubles with each further one
    max_s: float = 5.0  # the longest wait of the client's own
    on: frozenset[Reason] = frozenset({"overloaded", "not_ready", "refused", "reset"})

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.base_s < 0 or self.max_s < 0:
            raise ValueError(
                f"max_attempts is {self.max_attempts}, base_s {self.base_s}, max_s {self.max_s}; "
                "give at least 1 attempt, and waits of 0 s or more"
            )


@dataclass(frozen=True)
class Tls:
    """PEM files; with None, httpx or gRPC use their default roots.

    ``roots`` verify the service's certificate. ``certificate`` is the client's own, for a service
    that requires one; its ``key`` may be in the same file.
    """

    roots: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = field(default=None, repr=False)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for connections.

        Raises :class:`OSError` if a file is unreadable or invalid (ssl.SSLError).
        """
        context = ssl.create_default_context(cafile=self.roots)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of roots, key and certificate, in grpcio's order."""
        key = self.key if self.key is not None else self.certificate
        files = (self.roots, key, self.certificate)
        roots, private_key, chain = (None if f is None else Path(f).read_bytes() for f in files)
        return roots, private_key, chain


@dataclass(frozen=True)
class Options:
    """The arguments of a client; ``api_key`` is never printed."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    tls: Tls | ssl.SSLContext | None = field(default=None, repr=False)
    allow_degraded: bool = True
    max_connections: int = 100
    transport: httpx.MockTransport | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked_timeout_s(self.timeout_s)
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise ValueError("the API key is empty or has characters that no header can carry")
        if self.max_connections < 1:
            raise ValueError(f"max_connections is {self.max_connections}: give 1 or more")

    @property
    def shown_url(self) -> str:
        """The URL for messages, without a user name and password."""
        return without_user(self.url)

    @property
    def key_headers(self) -> dict[str, str]:
        """The header of the API key, if there is one."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every HTTP request."""
        return {"user-agent": f"{DISTRIBUTION}/{__version__}"} | self.key_headers

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for https:// URLs."""
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        return httpx.create_ssl_context() if self.tls is None else self.tls.context()


class CallArguments(TypedDict, total=False):
    """The options of a call, as every client takes them; None is as if they were not there.

    Attributes:
        top_k: classes in the answer; None: the service's default.
        channels: "rgb" or "bgr", the order of an array's channels; not for files.
        timeout: seconds for this call, in place of the client's.
        priority: urgency of RFC 9218, 0 (first) to 7; from 4 on the image waits behind others.
        threshold: for a multi-label set, the lowest score of a label in the answer; None: the
            set's.
        model_set: for a service with several sets, the set's name; None: the first.
        plan: "full" asks every member, "fast" fewer where fewer suffice; None: the service's own.
        answer_set: whether to list the classes that hold the right one in 95 % of cases.
        embedding: the member whose pooled features the answer has.
        shrink: whether to scale large pictures down before they are sent (extra ``images``).
    """

    top_k: int | None
    channels: Channels | None
    timeout: float | None
    priority: int | None
    threshold: float | None
    model_set: str | None
    plan: str | None
    answer_set: bool | None
    embedding: str | None
    shrink: bool


Regions = Sequence[Sequence[float]]


@dataclass(frozen=True)
class CallOptions:
    """The checked :class:`CallArguments` of a call."""

    top_k: int | None = None
    channels: Channels | None = None
    timeout: float | None = None  # s
    priority: int | None = None
    threshold: float | None = None
    model_set: str | None = None
    plan: str | None = None
    answer_set: bool | None = None
    embedding: str | None = None
    shrink: bool = False
    regions: Regions | None = None  # (x, y, width, height) each

    def __post_init__(self) -> None:
        if self.regions is not None and self.shrink:
            raise ValueError("regions are of the picture as it is: leave shrink out")
        if self.timeout is not None:
            checked_timeout_s(self.timeout)
        if self.priority is not None and not 0 <= self.priority <= 7:
            raise ValueError(
                f"priority is {self.priority}: give an urgency of RFC 9218, 0 (first) to 7 (last)"
            )

    @property
    def query(self) -> dict[str, Any] | None:
        """The query parameters of a request; None without any."""
        names = ("top_k", "threshold", "model_set", "plan", "answer_set", "embedding")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None} or None

    @property
    def boxes(self) -> list[list[float]] | None:
        """The regions as plain numbers, which may have been NumPy's."""
        return None if self.regions is None else [list(map(float, each)) for each in self.regions]


@dataclass(frozen=True)
class Call:
    """The images of a request as files; a form has an answer for each.

    ``errors`` are of a form's images that cannot be sent, by index: they have no file.
    """

    images: Sequence[Image]
    files: Sequence[ShrunkFile]
    errors: Mapping[int, BadImage]
    is_form: bool
    options: CallOptions

    @classmethod
    def of(
        cls, image: Image | Sequence[Image], options: CallOptions, shorter: int | None = None
    ) -> "Call":
        """Return the call for an image, or for several, shrunk to ``shorter`` px.

        Raises:
            BadImage: the only image cannot be sent.
            ValueError: there are no images.
        """
        images, is_form = images_of(image)
        if not images:
            raise ValueError("no images: give one or more")
        if is_form and options.regions is not None:
            raise ValueError(f"regions are of one image, not of a list of {len(images)}")
        files, errors = files_of(images, options.channels, shorter, is_form)
        return cls(images, files, errors, is_form, options)

    @property
    def has_results(self) -> bool:
        """Whether the answer is a list of results, of files or of regions."""
        return self.is_form or self.options.regions is not None

    @property
    def num_results(self) -> int:
        """How many results the service sends."""
        return len(self.files if self.options.regions is None else self.options.regions)

    def headers(self, left_s: float) -> dict[str, str]:
        """Return an attempt's headers; its time is never 0, which the service refuses."""
        headers = {"x-request-timeout-seconds": f"{max(left_s, LEAST_SENT_S):.3f}"}
        if self.options.priority is not None:
            headers["priority"] = f"u={self.options.priority}"
        if any(file.before for file in self.files):  # the sizes before, "-" of files as they are
            headers[SHRUNK] = ", ".join(file.size_before for file in self.files)
        return headers


def build(client: httpx.AsyncClient, options: Options, call: Call, left_s: float) -> httpx.Request:
    """Return the request for an attempt that may take ``left_s``."""
    body: dict[str, Any] = {"content": call.files[0].data}
    if call.is_form:
        parts = [(str(n), f.data, "application/octet-stream") for n, f in enumerate(call.files)]
        body = {"files": [("files", part) for part in parts]}
    query = call.options.query
    if (boxes := call.options.boxes) is not None:
        query = {**(query or {}), "regions": json.dumps(boxes)}
    return client.build_request(
        "POST",
        f"{options.url}/v1/classify",
        params=query,
        headers=call.headers(left_s),
        timeout=httpx.Timeout(left_s, connect=min(left_s, CONNECT_S)),
        **body,
    )


def outcomes(options: Options, call: Call, response: httpx.Response) -> list[Outcome]:
    """Return the outcome of each file or region, in order.

    Raises :class:`TandemError` if the request failed as a whole, or the answer is not Tandem's.
    """
    status = response.status_code
    try:
        answer = json.loads(response.content)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise _error_of(answer["error"], response)
    message, cause = f"{options.shown_url} answered {status}, but not as Tandem does", None
    try:
        if status == httpx.codes.OK and isinstance(answer, dict):
            rows = answer["results"] if call.has_results else [answer]
            if len(rows) == call.num_results:
                return [outcome_of(row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = error
    if has_error_of(status):  # a load balancer's own answer
        raise _error_of({"code": f"http_{status}", "message": message}, response)
    raise BadAnswer(message, "bad_answer", status=status) from cause


def _error_of(fields: Mapping[str, Any], response: httpx.Response) -> TandemError:
    after_s = retry_after_s(response.headers.get("retry-after"))
    return error_of(fields, response.status_code, after_s)


def failure(
    options: Options, attempts: "Attempts", error: httpx.HTTPError | ssl.SSLError
) -> TandemError:
    """Return the error for a request without an answer."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return attempts.exceeded()
    return Unreachable(f"no answer from {options.shown_url} ({cause_of(error)})", _reason(error))


def _reason(error: httpx.HTTPError | ssl.SSLError) -> Reason | None:
    """Return why the request may be retried; None for a bad certificate, which stays bad."""
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
        return None
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "refused"
    ended = httpx.NetworkError | httpx.RemoteProtocolError
    return "reset" if isinstance(error, ended) else None


def cause_of(error: BaseException) -> str:
    """Return why a connection failed in the system's words, such as "Connection refused"."""
    text = str(error) or type(error).__name__
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError | socket.gaierror):
            text = cause.strerror or text
        elif isinstance(cause, OSError) and cause.errno:
            text = os.strerror(cause.errno)  # asyncio's own text names its function
    return text


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes; the first of several addresses speaks for all."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        several = getattr(cause, "exceptions", ())
        cause = cause.__cause__ or (several[0] if several else cause.__context__)


def answer_of(
    call: Call, received: Sequence[Outcome], options: Options
) -> Classification | list[Result]:
    """Return the caller's result: the answer, or a result for each image or region.

    Raises :class:`TandemError` if the only image has no answer.
    """
    if call.options.regions is not None:
        return [result_of(n, call.images[0], each, options) for n, each in enumerate(received)]
    if not call.is_form:
        return checked(received[0], allow_degraded=options.allow_degraded)
    files, numbered = iter(received), enumerate(call.images)
    return [
        result_of(n, image, call.errors.get(n) or next(files), options) for n, image in numbered
    ]


def result_of(index: int, image: Image, outcome: Outcome, options: Options) -> Result:
    """Return the result for one of several images."""
    return Result.of(index, path_of(image), outcome, allow_degraded=options.allow_degraded)


class Attempts:
    """The attempts of a call, and the time left for them."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy, self._timeout_s = policy, checked_timeout_s(timeout_s)
        self._now, self._uniform = now, uniform
        self._ends_at = now() + timeout_s
        self._num = self._num_broken = 0

    @classmethod
    def of(cls, options: Options, call: Call, now: Callable[[], float]) -> "Attempts":
        """Return the attempts of a call that begins now."""
        return cls(options.retry, call.options.timeout or options.timeout_s, now)

    def begin(self) -> float:
        """Count an attempt; return how many seconds it may take.

        Raises :class:`DeadlineExceeded` if none are left.
        """
        self._num += 1
        left_s = self._ends_at - self._now()
        if left_s <= 0:
            raise self.exceeded()
        return left_s

    def exceeded(self) -> DeadlineExceeded:
        """Return the error of a call whose time has passed."""
        return DeadlineExceeded(
            f"no answer within {self._timeout_s:g} s; try again, or allow more time (timeout)",
            "deadline",
        )

    def wait_s(self, error: TandemError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            TandemError: ``error`` itself, if it must not be retried.
        """
        policy = self._policy
        if error.reason not in policy.on or self._num >= policy.max_attempts:
            raise error
        # The file itself may have ended that part of the service: it must not end all of them.
        self._num_broken += isinstance(error, BrokenOff)
        if self._num_broken > MAX_BROKEN_OFF:
            raise error
        most = min(policy.max_s, policy.base_s * 2.0 ** min(self._num - 1, MOST_DOUBLINGS))
        wait = (error.retry_after_s or 0.0) + self._uniform(0.0, most)
        if self._now() + wait >= self._ends_at:
            raise error
        return wait


def checked_timeout_s(timeout_s: float) -> float:
    """Return a call's time after checking it.

    Raises :class:`ValueError` if it is not a number of seconds above 0.
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout is {timeout_s!r}: give seconds, a number above 0")
    return timeout_s


def checked_url(url: str) -> str:
    """Return a service's URL without slashes at its end.

    Raises :class:`ValueError` if it is not an ``http://`` or ``https://`` URL.
    """
    shown = without_user(url)
    if not _IS_HTTP.match(url):
        host = shown.rpartition("://")[2].lstrip("/") or "HOST:PORT"
        raise ValueError(f"the address is {shown!r}; write http://{host}")
    try:
        parts = httpx.URL(url)
        parts.raw_host.decode("ascii").encode("idna")  # as the system's resolver is asked
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{shown} is no address: {error}") from error
    if (parts.port or 0) > MAX_PORT:  # the event loop would raise OverflowError
        raise ValueError(f"{shown} is no address: ports end at {MAX_PORT}")
    return url.rstrip("/")


def without_user(url: str) -> str:
    """Return a URL for messages, without a user name and password."""
    return _USER_INFO.sub("", url)


def is_loopback(address: str) -> bool:
    """Whether ``address``, a URL or HOST:PORT, is on this machine.

    Then no proxy is used, despite HTTP_PROXY, so that photo and key stay on this machine.
    """
    try:
        host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        try:
            ip = ipaddress.ip_address(socket.inet_aton(host))  # 127.1, 2130706433
        except (OSError, ValueError):
            return False
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return bool(mapped.is_loopback or mapped.is_unspecified)
