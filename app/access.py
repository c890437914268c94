"""API keys and the files of TLS: their forms, the keys that the service accepts, a caller's own.

A key never becomes part of a message, and no command takes one as an argument: ps would show it.
"""

import hashlib
import hmac
import logging
import re
import ssl
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environment import (
    CALLERS_KEY_VARIABLE,
    KEYS_VARIABLE,
    environment_value,
    whole_environment,
)
from app.errors import UnauthorizedError
from models.errors import TandemError

logger = logging.getLogger("ray.serve")

MIN_LENGTH = 24  # 144 bits of base64, 96 of hexadecimal: nobody tries them all
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1: what "Bearer" may carry
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
UNNAMED = "unnamed"  # the metric's label for a key without a name
LOOK_EVERY_S = 1.0
MAKE_ONE = "openssl rand -hex 32 makes one"
Stamp = tuple[int, int] | None  # None: there is no file


class ApiKeyError(TandemError):
    """Keys that cannot be read, or that are none."""

    code = "api_key"


def keys_in(text: str, where: str) -> list[str]:
    """Return the lines of ``text`` that hold a key, ``KEY`` or ``NAME:KEY``; # begins a comment.

    Raises:
        ApiKeyError: no key, one that is too short or has other characters, or a name that is none;
            named by its line.

    """
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    for number, line in keys:
        name, colon, key = line.rpartition(":")
        if len(key) < MIN_LENGTH:
            raise ApiKeyError(
                f"{where}, line {number}: a key of {len(key)} characters, the least is "
                f"{MIN_LENGTH}; {MAKE_ONE}"
            )
        if not TOKEN.fullmatch(key):
            raise ApiKeyError(
                f"{where}, line {number}: a key is letters, digits and ._~+/- with = at its end; "
                f"{MAKE_ONE}"
            )
        if colon and not NAME.fullmatch(name):
            raise ApiKeyError(
                f"{where}, line {number}: a key's name is 1 to 64 letters, digits and ._- before "
                "the colon"
            )
    if not keys:
        raise ApiKeyError(f"{where} holds no key; {MAKE_ONE}, one a line")
    return [line for _, line in keys]


def read_key_file(path: Path) -> list[str]:
    """Return :func:`keys_in` of a file; :class:`ApiKeyError`: it cannot be read, or has none."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ApiKeyError(f"cannot read the keys of {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ApiKeyError(f"{path} is no text, so it holds no keys; {MAKE_ONE}") from None
    return keys_in(text, str(path))


def sent_key(key_file: Path | None) -> str | None:
    """Return the key for a service that wants one: the file's first, or TANDEM_API_KEY's, or None.

    Raises:
        ApiKeyError: the file or the variable holds no key.

    """
    if key_file is not None:
        lines = read_key_file(key_file)
    elif text := environment_value(CALLERS_KEY_VARIABLE):
        lines = keys_in(text, CALLERS_KEY_VARIABLE)
    else:
        return None
    return lines[0].rpartition(":")[2]


def key_headers(key_file: Path | None) -> dict[str, str]:
    """Return :func:`sent_key` in its header; empty without a key; raises as that does."""
    key = sent_key(key_file)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def file_stamp(path: Path) -> Stamp:
    """Return what changes with the file, its permissions, and what a link to it names."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


class KeyFile:
    """The keys of a file, which is read again when it changes.

    While the file cannot be read, the keys of the last reading stay valid.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stamp, self._looked = file_stamp(path), clock()
        self._names = self._read()

    def names(self) -> dict[bytes, str]:
        """Return the keys' names by their hashes; checks the file for changes once a second."""
        if self._clock() - self._looked >= LOOK_EVERY_S:
            self._looked = self._clock()
            before, self._stamp = self._stamp, file_stamp(self._path)
            if self._stamp != before:
                try:
                    self._names = self._read()
                    text = "%s changed: %d keys are accepted now"
                    logger.info(text, self._path, len(self._names))
                except ApiKeyError as error:
                    text = "%s; the previous keys stay valid until it is fixed"
                    logger.error(text, error.message)
        return self._names

    def _read(self) -> dict[bytes, str]:
        path, names = self._path, _by_hash(read_key_file(self._path))
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning(f"{path} may be read by others (mode {mode:03o}): chmod 600 {path}")
        return names


class Keys:
    """The accepted keys. Only their hashes are kept, so that no message can show a key.

    Args:
        lines: keys, each ``KEY`` or ``NAME:KEY``.
        file: further keys.
        admitted: called with the key's name for each request that is let in.

    """

    def __init__(
        self,
        lines: Iterable[str],
        file: KeyFile | None = None,
        admitted: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fixed, self._file, self._admitted = _by_hash(lines), file, admitted

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> dict[bytes, str]:
        return self._fixed if self._file is None else self._file.names() | self._fixed

    def name_of(self, key: bytes) -> str | None:
        """Return the name of ``key`` in constant time; None if it is not accepted."""
        digest, its_name = _digest(key), None
        for own, name in self._names().items():
            its_name = name if hmac.compare_digest(own, digest) else its_name
        return its_name

    def check(self, sent: Sequence[str]) -> None:
        """Raise :class:`UnauthorizedError` unless ``sent`` is one header with an accepted key.

        Without keys every request is let in.
        """
        if not self:
            return
        scheme, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if scheme.lower() == "bearer":
            name = self.name_of(key.strip().encode("utf-8", "replace"))
            if name is not None:
                self._admitted(name)
                return
        error = UnauthorizedError(
            "the key is none of this service's keys"
            if sent
            else "this service requires an API key: send the header Authorization: Bearer KEY"
        )
        error.is_given = bool(sent)
        raise error


def _by_hash(lines: Iterable[str]) -> dict[bytes, str]:
    parts = (line.rpartition(":") for line in lines)
    return {_digest(key.encode("ascii")): name or UNNAMED for name, _, key in parts}


def _digest(key: bytes) -> bytes:
    # Keys are long and random, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(key).digest()


def read_keys(path: Path | None, admitted: Callable[[str], None] = lambda _: None) -> Keys:
    """Return the keys of a file and of TANDEM_API_KEYS; without any, all may call.

    Raises:
        ApiKeyError: a key is too short or malformed, or the file cannot be read. So is a file or
            variable without keys: a service that should have keys does not start without them.

    """
    file = KeyFile(path) if path else None
    text = whole_environment().get(KEYS_VARIABLE)  # set but empty: no keys, which is refused
    lines = [] if text is None else keys_in(text.replace(",", "\n"), KEYS_VARIABLE)
    return Keys(lines, file, admitted)


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
