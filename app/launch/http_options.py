"""The ``http_options`` that ``tandem serve`` itself acts on: address and TLS."""

import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from app.access.client_tls import no_passphrase, reason
from app.errors import ConfigError
from app.launch.ports import joined

SSL_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
SSL_OPTIONS = (*SSL_FILES, "ssl_keyfile_password")
CHAIN = "tls.pem"  # the certificate's file name in the run's folder
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how this machine reaches all interfaces
HOST = re.compile(r"[0-9A-Za-z.:_-]+")  # an address or a name


def check_host(host: str, option: str) -> None:
    """Raise :class:`ConfigError` unless it is an address or a name; ``""`` is all interfaces."""
    if not HOST.fullmatch(host):
        raise ConfigError(
            f"{option} is {host!r}: give an address, as 127.0.0.1 or ::1; 0.0.0.0 and :: are all "
            "interfaces"
        )


class HttpOptions(BaseModel):
    """The address of the service and its TLS files, from Serve's ``http_options``.

    Raises:
        ConfigError: the host is not a valid address or name.

    """

    model_config = ConfigDict(frozen=True)

    host: str
    port: int
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        check_host(host, "http_options.host")
        return host

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile and self.ssl_keyfile else "http"

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine reaches the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def address(self, port: int) -> str:
        """Return ``port`` with the address at which this machine reaches the service."""
        return joined(REACHED_AT.get(self.host, self.host), port)


@dataclass(frozen=True)
class Tls:
    """PEM files: the certificate with its intermediates, its key, and the clients' CA."""

    certificate: Path
    key: Path
    clients: Path | None  # CA of the clients' certificates; None: any client may connect

    def link(self, folder: Path) -> str:
        """Link the files into the run's folder; return HAProxy's ``bind`` arguments for them.

        HAProxy looks for the key next to the certificate. Links, not copies: the key exists once,
        and a restarted HAProxy reads renewed files (:mod:`app.launch.haproxy`).
        """
        chain = folder / CHAIN
        for link, target in ((chain, self.certificate), (folder / f"{CHAIN}.key", self.key)):
            link.symlink_to(target.absolute())
        # HTTP/2 would save browsers a connection or two, but has its own form of slow loris.
        words = f"crt {chain} alpn http/1.1"
        if self.clients:
            roots = folder / "clients.pem"
            roots.symlink_to(self.clients.absolute())
            words += f" ca-file {roots} verify required"
        return words


def tls_of(http: HttpOptions) -> Tls | None:
    """Return the TLS files of the options, or None without TLS.

    Raises:
        ConfigError: a file is missing or not PEM, the key is encrypted or does not match, or there
            are options of TLS without a certificate.

    """
    certificate, key, clients = http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs
    if not certificate or not key:
        if clients or http.ssl_keyfile_password:
            raise ConfigError(
                "http_options.ssl_ca_certs and ssl_keyfile_password are for TLS, and would be "
                "ignored: give ssl_certfile and ssl_keyfile too"
            )
        return None
    if http.ssl_keyfile_password:
        raise ConfigError(
            "http_options.ssl_keyfile_password: HAProxy takes no passphrase; take it off with "
            "openssl pkey -in KEY -out NEW and chmod 600 NEW"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
        if clients:
            context.load_verify_locations(clients)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = ", ".join(filter(None, (certificate, key, clients)))
        raise ConfigError(f"http_options.ssl_...: {reason(error)} ({files})") from error
    return Tls(Path(certificate), Path(key), Path(clients) if clients else None)
