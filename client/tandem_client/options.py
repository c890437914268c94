"""What a client was made with, and what one call asks for."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tandem_client.images import Channels, Image, encoded, images_of
from tandem_client.retries import RetryPolicy, checked_timeout_s
from tandem_client.tls import Tls
from tandem_client.version import DISTRIBUTION, __version__

_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry without quoting; no spaces
_USER_INFO = re.compile(r"(?<=//)[^/?#]*@")


@dataclass(frozen=True)
class Options:
    """The arguments of a client; ``api_key`` is shown nowhere."""

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
        """The address as messages have it: without a name and password that it may hold."""
        return _USER_INFO.sub("", self.url)

    @property
    def headers(self) -> dict[str, str]:
        """What every request has."""
        headers = {"user-agent": f"{DISTRIBUTION}/{__version__}"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    @property
    def limits(self) -> httpx.Limits:
        """Every connection may be kept: as many callers as there were come again."""
        return httpx.Limits(
            max_connections=self.max_connections, max_keepalive_connections=self.max_connections
        )

    def tls_context(self) -> ssl.SSLContext:
        """Return what connections to https:// are made with."""
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        return httpx.create_ssl_context() if self.tls is None else self.tls.context()


@dataclass(frozen=True)
class CallOptions:
    """What one call asks for; None leaves it to the service, or to the client's own options."""

    top_k: int | None = None
    channels: Channels | None = None
    timeout_s: float | None = None
    priority: int | None = None
    threshold: float | None = None

    @property
    def query(self) -> dict[str, float] | None:
        """What the address of a request has; None: nothing."""
        given = {"top_k": self.top_k, "threshold": self.threshold}
        return {name: value for name, value in given.items() if value is not None} or None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            checked_timeout_s(self.timeout_s)
        if self.priority is not None and not 0 <= self.priority <= 7:
            raise ValueError(
                f"priority is {self.priority}: give an urgency of RFC 9218, 0 (first) to 7 (last)"
            )


@dataclass(frozen=True)
class Call:
    """The images of one request as files; one of a form has an answer for each."""

    images: Sequence[Image]
    files: Sequence[bytes]
    is_form: bool
    options: CallOptions

    @classmethod
    def of(cls, given: Image | Sequence[Image], options: CallOptions) -> "Call":
        """Return the call for an image, or for several.

        Raises:
            BadImage: one of them cannot be sent.
            ValueError: there is none.

        """
        images, is_form = images_of(given)
        if not images:
            raise ValueError("no images: give one or more")
        files = [encoded(image, options.channels) for image in images]
        return cls(images, files, is_form, options)
