"""The files with which a client speaks to a service over TLS."""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Tls:
    """Files in PEM; None leaves what httpx (or gRPC) trusts by itself.

    ``roots`` are trusted when the service shows its certificate. ``certificate`` is the client's
    own, for a service that asks for one; its ``key`` may be in the same file.
    """

    roots: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = field(default=None, repr=False)

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with.

        Raises:
            OSError: a file cannot be read, or is no certificate or key (ssl.SSLError).

        """
        context = ssl.create_default_context(cafile=self.roots)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of roots, key and certificate, as grpcio wants them."""
        key = self.key if self.key is not None else self.certificate
        files = (self.roots, key, self.certificate)
        roots, private_key, chain = (None if f is None else Path(f).read_bytes() for f in files)
        return roots, private_key, chain
