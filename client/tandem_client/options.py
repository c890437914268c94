"""The options of a client, and those of a call."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from tandem_client.addresses import without_user
from tandem_client.errors import BadImage
from tandem_client.images import Channels, Image, encoded, images_of
from tandem_client.retries import RetryPolicy, checked_timeout_s
from tandem_client.tls import Tls
from tandem_client.version import DISTRIBUTION, __version__

_KEY = re.compile(r"[\x21-\x7e]+")  # characters that a header can carry without quoting


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
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        headers = {"user-agent": f"{DISTRIBUTION}/{__version__}"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    @property
    def limits(self) -> httpx.Limits:
        """The limits of connections: all may be kept, since as many callers may return."""
        return httpx.Limits(
            max_connections=self.max_connections, max_keepalive_connections=self.max_connections
        )

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for https:// URLs."""
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        return httpx.create_ssl_context() if self.tls is None else self.tls.context()


@dataclass(frozen=True)
class CallOptions:
    """The options of a call; None leaves them to the service, or to the client's options."""

    top_k: int | None = None
    channels: Channels | None = None
    timeout_s: float | None = None
    priority: int | None = None
    threshold: float | None = None
    model_set: str | None = None

    @property
    def query(self) -> dict[str, float | str] | None:
        """Return the query parameters of a request; None without any."""
        values = {"top_k": self.top_k, "threshold": self.threshold, "model_set": self.model_set}
        return {name: value for name, value in values.items() if value is not None} or None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            checked_timeout_s(self.timeout_s)
        if self.priority is not None and not 0 <= self.priority <= 7:
            raise ValueError(
                f"priority is {self.priority}: give an urgency of RFC 9218, 0 (first) to 7 (last)"
            )


@dataclass(frozen=True)
class Call:
    """The images of a request as files; a form has an answer for each.

    ``errors`` are of a form's images that cannot be sent, by index: they have no file.
    """

    images: Sequence[Image]
    files: Sequence[bytes]
    errors: Mapping[int, BadImage]
    is_form: bool
    options: CallOptions

    @classmethod
    def of(cls, image: Image | Sequence[Image], options: CallOptions) -> "Call":
        """Return the call for an image, or for several.

        Raises:
            BadImage: the only image cannot be sent.
            ValueError: there are no images.

        """
        images, is_form = images_of(image)
        if not images:
            raise ValueError("no images: give one or more")
        files, errors = [], {}
        for index, each in enumerate(images):
            try:
                files.append(encoded(each, options.channels))
            except BadImage as error:
                if not is_form:
                    raise
                errors[index] = error
        return cls(images, files, errors, is_form, options)
