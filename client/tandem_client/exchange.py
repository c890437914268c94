"""One HTTP request and its answer: options, retries, TLS, addresses.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015), in
addition to the service's Retry-After. So clients that were refused together do not return together.
"""

import asyncio
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from tandem_client.answers import (
    BY_STATUS,
    BadAnswer,
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
    outcome_of,
    retry_after_s,
)
from tandem_client.images import (
    DISTRIBUTION,
    Asked,
    Call,
    CallOptions,
    Image,
    __version__,
    checked_timeout_s,
    path_of,
    shorter_side,
    takes_long,
)

T = TypeVar("T")
CONNECT_S = 5.0  # longer than any handshake; then another attempt may reach another host
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
    ``reset`` (the connection, or a part of the service, ended before the answer). A call that is
    sent again changes nothing more in the service, so all of them are safe.
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


class ServiceClient:
    """A client of a service: over HTTP or gRPC, blocking or not."""

    _options: Options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options.shown_url!r})"


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
        timeout=_limits(left_s),
        **body,
    )


def _limits(left_s: float) -> httpx.Timeout:
    return httpx.Timeout(left_s, connect=min(left_s, CONNECT_S))


def outcomes(options: Options, call: Call, response: httpx.Response) -> list[Outcome]:
    """Return the outcome of each file or region, in order.

    Raises :class:`TandemError` if the request failed as a whole, or the answer is not Tandem's.
    """

    def read(answer: Mapping[str, Any]) -> list[Outcome]:
        rows = answer["results"] if call.has_results else [answer]
        if len(rows) != call.num_results:
            raise ValueError
        return [outcome_of(row) for row in rows]

    return answered(options, response, read)


def answered(
    options: Options, response: httpx.Response, read: Callable[[Mapping[str, Any]], T]
) -> T:
    """Return what ``read`` makes of an answer's JSON object.

    Raises :class:`TandemError` if the request failed, or the answer is not Tandem's.
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
            return read(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = error
    if status in BY_STATUS:  # a load balancer's own answer
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
    def of(cls, options: Options, timeout_s: float | None, now: Callable[[], float]) -> "Attempts":
        """Return the attempts of a call that begins now."""
        return cls(options.retry, options.timeout_s if timeout_s is None else timeout_s, now)

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


class AsyncCalls:
    """Sends calls to a service over its own connections: attempts, waits, and their deadline."""

    def __init__(self, options: Options, context: ssl.SSLContext) -> None:
        self.options, self._context = options, context
        self._shorter: dict[str | None, int] = {}  # by set
        self._num_vain: Counter[str | None] = Counter()
        self._learning = asyncio.Lock()
        most = options.max_connections  # all may be kept, since as many callers may return
        self._http = httpx.AsyncClient(
            headers=options.headers,
            verify=context,
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            transport=options.transport,
            trust_env=not is_loopback(options.url),
        )
        self._now: Callable[[], float] | None = None  # the running loop's clock
        self._sleep = asyncio.sleep

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def copy(self, max_connections: int) -> "AsyncCalls":
        """Return calls over connections of their own, for another event loop."""
        copy = AsyncCalls(replace(self.options, max_connections=max_connections), self._context)
        copy._shorter = self._shorter
        return copy

    async def call_of(self, image: Image | Sequence[Image], options: CallOptions) -> Call:
        """Return the call for images; files are read, and pictures packed, on another thread."""
        shorter = await self.shorter(options) if options.shrink else None
        if shorter is not None or takes_long(image):
            return await asyncio.to_thread(Call.of, image, options, shorter)
        return Call.of(image, options)

    async def shorter(self, options: CallOptions) -> int:
        """Return the shorter side of shrunk pictures, px; asks the service once for each set.

        Without its answer it is the usual one, also for calls that waited for that attempt.
        """
        name, num_vain = options.model_set, self._num_vain[options.model_set]
        async with self._learning:
            if name not in self._shorter and num_vain == self._num_vain[name]:
                within_s = min(options.timeout or self.options.timeout_s, CONNECT_S)
                query = None if name is None else {"model_set": name}
                try:
                    asked = self._http.get(f"{self.options.url}/v1/models", params=query)
                    response = (await asyncio.wait_for(asked, within_s)).raise_for_status()
                    self._shorter[name] = shorter_side(response.json())
                except (httpx.HTTPError, ssl.SSLError, ValueError, asyncio.TimeoutError):
                    self._num_vain[name] += 1
            return self._shorter.get(name, shorter_side(None))

    async def ask(self, call: Call) -> list[Outcome]:
        """Return the service's outcome for each file, retrying as the options allow.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.answers`.
        """
        if not call.num_results:
            return []
        return await self._answer(
            call.options.timeout,
            lambda left_s: build(self._http, self.options, call, left_s),
            lambda response: outcomes(self.options, call, response),
        )

    async def send(self, asked: Asked[T]) -> T:
        """Return the answer of a route that does not classify; retries and errors as above."""
        url = f"{self.options.url}{asked.path}"
        return await self._answer(
            None,
            lambda left_s: self._http.build_request(
                asked.method, url, params=asked.query, timeout=_limits(left_s), **asked.body
            ),
            lambda response: answered(self.options, response, asked.answer),
        )

    async def _answer(
        self,
        within_s: float | None,
        make: Callable[[float], httpx.Request],
        read: Callable[[httpx.Response], T],
    ) -> T:
        attempts = Attempts.of(self.options, within_s, self._now or asyncio.get_running_loop().time)
        while True:
            left_s = attempts.begin()
            try:
                return read(await asyncio.wait_for(self._attempt(make(left_s), attempts), left_s))
            except asyncio.TimeoutError:
                raise attempts.exceeded() from None
            except TandemError as error:
                wait_s = attempts.wait_s(error)
            await self._sleep(wait_s)

    async def _attempt(self, request: httpx.Request, attempts: Attempts) -> httpx.Response:
        try:
            return await self._http.send(request)
        except (httpx.HTTPError, ssl.SSLError) as error:  # httpx passes on a TLS alert in an answer
            raise failure(self.options, attempts, error) from error


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
