"""The TLS files of a client: trusted roots, and its own certificate and key."""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path


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

        Raises:
            OSError: a file is unreadable or invalid (ssl.SSLError).

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
