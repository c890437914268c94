"""The part of Serve's ``http_options`` that ``tandem serve`` acts on itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

SSL_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
SSL_OPTIONS = (*SSL_FILES, "ssl_keyfile_password")
ALL_INTERFACES = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class HttpOptions:
    """Where the service listens and whether it speaks TLS, by Serve's own names."""

    host: str
    port: int
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Take from Serve's options what is needed here."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in known})

    @property
    def has_tls(self) -> bool:
        """Whether clients speak https."""
        return bool(self.ssl_certfile and self.ssl_keyfile)

    @property
    def scheme(self) -> str:
        """What clients speak."""
        return "https" if self.has_tls else "http"

    @property
    def local_host(self) -> str:
        """The address under which this machine reaches the service."""
        return "127.0.0.1" if self.host == ALL_INTERFACES else self.host

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine reaches the service."""
        return self.host in LOOPBACK
