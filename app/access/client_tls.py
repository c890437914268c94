"""The files with which a client speaks to a service over TLS, and their errors."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from models.errors import TandemError


class CertificateError(TandemError):
    """A file that is no certificate or key, or a key that is another certificate's."""

    code = "certificate"


@dataclass(frozen=True)
class ClientTls:
    """Files in PEM; None leaves what the system has.

    ``roots`` are trusted when the service shows its certificate. ``certificate`` is the client's
    own, for a service that asks for one; its ``key`` may be in the same file.
    """

    roots: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return what connections are made with; None where nothing was given.

        Raises:
            CertificateError: a file cannot be used, or there is a key without a certificate.

        """
        if self.key is not None and self.certificate is None:
            raise CertificateError(f"a key without its certificate: {self.key}; --client-cert FILE")
        if self.roots is None and self.certificate is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.roots)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, no_passphrase)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            options = ("--ca", self.roots), ("--client-cert", self.certificate)
            files = (*options, ("--client-key", self.key))
            named = ", ".join(f"{option} {file}" for option, file in files if file)
            raise CertificateError(f"cannot use {named}: {reason(error)}") from error
        return context


def no_passphrase() -> str:
    """Say that a key has a passphrase; OpenSSL would ask the terminal."""
    raise ValueError("the key has a passphrase; take it off with openssl pkey -in KEY -out NEW")


def reason(error: Exception) -> str:
    """Return in words why files could not be loaded."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        return f"no certificate and key in PEM ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
