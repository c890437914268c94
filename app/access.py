"""API keys and the files of TLS: their forms, the keys that the service accepts, a caller's own.

A key never becomes part of a message, and no command takes one as an argument: ps would show it.
"""

import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import ssl
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.environment import (
    CALLERS_KEY_VARIABLE,
    KEYS_VARIABLE,
    environment_value,
    whole_environment,
)
from app.errors import ForbiddenError, RateLimitedError, UnauthorizedError
from app.setting_values import MAKE_ONE, ApiKeyError, KeyEntry, fields_of, keys_in
from models.errors import TandemError

logger = logging.getLogger("ray.serve")

LOOK_EVERY_S = 1.0
Stamp = tuple[int, int] | None  # None: there is no file
MAX_ADDRESSES = 4096  # callers without a key that are remembered
OF_HOST_V6 = 64  # bits of an IPv6 address that name a host's network: it may have all the rest
# A comma of TANDEM_API_KEYS between keys, not between a key's options.
BETWEEN_KEYS = re.compile(r",(?!\s*(?:(?:rate|burst|share|lane|sets|admin)=|admin\s*(?:[,\n]|$)))")
COUNT = re.compile("[1-9][0-9]{0,3}")
RESULTS = ("answered", "refused", "failed")  # what becomes of a key's requests
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what it may do. Made once for a key, or for an address without keys.

    Callers with equal names are one: they share places, queue and rate.
    """

    name: str  # the key's name; in a service without keys, the client's address
    share: float = 1.0  # weight of its places and of its queue
    lane: Literal["interactive", "bulk"] = "interactive"  # the highest
    sets: frozenset[str] | None = None  # that it may ask; None: all
    is_admin: bool = True  # whether it may change traffic, sets and regions, and teach
    rate: float | None = None  # requests a second; None: no limit
    burst: float = 1.0  # requests at once, after a pause
    has_key: bool = False  # metrics name only these: an address could be any

    def check_admin(self) -> None:
        """Raise :class:`ForbiddenError` unless the caller may change the service."""
        if not self.is_admin:
            raise ForbiddenError(
                f"the key {self.name} may ask for answers alone; for traffic, loading of sets, "
                "feedback, teaching and shared memory use a key with the option admin"
            )

    def check_set(self, name: str) -> None:
        """Raise :class:`ForbiddenError` unless the caller may ask the model set ``name``."""
        if self.sets is not None and name not in self.sets:
            sets = ", ".join(sorted(self.sets))
            raise ForbiddenError(f"the key {self.name} may not ask {name}; name one of {sets}")


ANYONE = Caller("anyone")  # whose address is unknown


def read_key_file(path: Path) -> list[KeyEntry]:
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
        entries = read_key_file(key_file)
    elif text := environment_value(CALLERS_KEY_VARIABLE):
        entries = keys_in(text, CALLERS_KEY_VARIABLE)
    else:
        return None
    return entries[0].key


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
        self._callers = self._read()

    def callers(self) -> dict[bytes, Caller]:
        """Return the callers by their keys' hashes; looks once a second whether the file changed.

        The dictionary is a new one after a change.
        """
        if self._clock() - self._looked >= LOOK_EVERY_S:
            self._looked = self._clock()
            before, self._stamp = self._stamp, file_stamp(self._path)
            if self._stamp != before:
                try:
                    self._callers = self._read()
                    text = "%s changed: %d keys are accepted now"
                    logger.info(text, self._path, len(self._callers))
                except ApiKeyError as error:
                    text = "%s; the previous keys stay valid until it is fixed"
                    logger.error(text, error.message)
        return self._callers

    def _read(self) -> dict[bytes, Caller]:
        path, callers = self._path, _by_hash(read_key_file(self._path))
        try:
            status = path.stat()
        except OSError:  # it was moved meanwhile, and the next look reads what is there then
            return callers
        mode = stat.S_IMODE(status.st_mode)
        # A secret of Kubernetes is root's, and the pod's user reads it by its group.
        is_secret = status.st_uid == 0 != os.geteuid() or (path.parent / "..data").is_symlink()
        if mode & (stat.S_IROTH if is_secret else stat.S_IRGRP | stat.S_IROTH):
            logger.warning(f"{path} may be read by others (mode {mode:03o}): chmod 600 {path}")
        return callers


@dataclass(slots=True)
class KeyFigures:
    """What became of a key's requests, and what they used, since the service began."""

    answered: int = 0
    refused: int = 0  # 403 and 429
    failed: int = 0  # other errors
    images: int = 0  # in answers
    cpu_ms: float = 0.0  # of decoding and of the networks


class TokenBucket:
    """Grants ``rate`` requests a second, and ``burst`` at once after a pause."""

    __slots__ = ("_at", "_tokens")

    def __init__(self, tokens: float, now: float) -> None:
        self._tokens, self._at = tokens, now

    def take(self, rate: float, burst: float, now: float) -> float:
        """Grant a request and return 0, or return in how many seconds one will be granted."""
        self._tokens = min(burst, self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens < 1 - 1e-9:  # a caller that waited as long as it was told has a token
            return (1 - self._tokens) / rate
        self._tokens -= 1
        return 0.0

    def headers(self, rate: float, burst: float, wait_s: float) -> dict[str, str]:
        """Return the headers of draft-ietf-httpapi-ratelimit-headers-11 after a request.

        The window is the time in which an empty bucket fills. ``t`` is the time until it is full,
        or for a refused request until the next is granted, as ``Retry-After`` is.
        """
        full_s = (burst - self._tokens) / rate
        return {
            "ratelimit-policy": f'"requests";q={int(burst)};w={seconds(burst / rate)}',
            "ratelimit": f'"requests";r={int(self._tokens)};t={seconds(wait_s or full_s)}',
        }


def seconds(duration_s: float) -> int:
    """Return a duration in whole seconds, at least 1, as headers have it."""
    return max(1, math.ceil(duration_s))


class Keys:
    """The accepted keys. Only their hashes are kept, so that no message can show a key.

    Args:
        lines: keys, each an entry or ``NAME:KEY:OPTIONS``.
        file: further keys.
        counted: called with a key's name, a field of :class:`KeyFigures`, and by how much it grew.
        proxies: networks whose ``X-Forwarded-For`` is believed, in a service without keys.
    """

    def __init__(
        self,
        lines: Iterable[KeyEntry | str],
        file: KeyFile | None = None,
        counted: Callable[[str, str, float], None] = lambda *_: None,
        proxies: Sequence[Network] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fixed, self._file, self._counted = _by_hash(lines), file, counted
        # Callers without a key, by address and X-Forwarded-For.
        self.by_address: dict[tuple[str, str], Caller] = {}
        self._buckets: dict[tuple[str, float, float], TokenBucket] = {}
        self.proxies, self._clock = proxies, clock
        self.figures: dict[str, KeyFigures] = {}  # by name

    def __len__(self) -> int:
        return len(self._callers())

    def hashes(self) -> tuple[str, ...]:
        """Return the SHA-256 of every accepted key, in hexadecimal; a file is read again first."""
        return tuple(digest.hex() for digest in self._callers())

    def _callers(self) -> dict[bytes, Caller]:
        return self._fixed if self._file is None else self._file.callers() | self._fixed

    def caller_of(self, key: bytes) -> Caller | None:
        """Return whose ``key`` it is, in constant time; None if it is not accepted."""
        digest, its_caller = _digest(key), None
        for own, caller in self._callers().items():
            its_caller = caller if hmac.compare_digest(own, digest) else its_caller
        return its_caller

    def check(self, sent: Sequence[str], address: str = "", forwarded: str = "") -> Caller:
        """Return whose request it is: the key's, or without keys the client's address.

        Args:
            sent: the values of all headers ``Authorization``.
            address: where the connection comes from.
            forwarded: the values of ``X-Forwarded-For``, joined.

        Raises:
            UnauthorizedError: ``sent`` is not one header with an accepted key.
        """
        if not self:
            return self._of_address(address, forwarded)
        scheme, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if scheme.lower() == "bearer":
            caller = self.caller_of(key.strip().encode("utf-8", "replace"))
            if caller is not None:
                return caller
        error = UnauthorizedError(
            f"the request has {len(sent)} headers Authorization; send one header"
            if len(sent) > 1
            else "the key is none of this service's keys; ask its operator for one"
            if sent
            else "this service requires an API key: send the header Authorization: Bearer KEY"
        )
        error.is_given = bool(sent)
        raise error

    def take(self, caller: Caller, gateways: str = "") -> dict[str, str]:
        """Count a request in its key's rate; return the headers that say so, none without a rate.

        Args:
            caller: whose request it is.
            gateways: how many Gateways answer, as HAProxy says; each grants its part of the rate.

        Raises:
            RateLimitedError: the key has used up its rate.
        """
        if (rate := caller.rate) is None:
            return {}
        part = rate / int(gateways) if COUNT.fullmatch(gateways) else rate
        burst, now = caller.burst, self._clock()
        # Keys of one name in file and variable may differ: neither fills the other's bucket.
        place = caller.name, rate, burst
        if (bucket := self._buckets.get(place)) is None:
            bucket = self._buckets[place] = TokenBucket(burst, now)
        wait_s = bucket.take(part, burst, now)
        headers = bucket.headers(rate, burst, wait_s)
        if wait_s:
            raise RateLimitedError(
                f"the key {caller.name} may send {rate:g} requests a second, and "
                f"{burst:g} at once; try again in {seconds(wait_s)} s",
                wait_s,
                headers,
            )
        return headers

    def count(self, caller: Caller, figure: str, by: float = 1) -> None:
        """Add to a key's field of :class:`KeyFigures`; callers without a key have none."""
        if caller.has_key:
            figures = self.figures.setdefault(caller.name, KeyFigures())
            setattr(figures, figure, getattr(figures, figure) + by)
            self._counted(caller.name, figure, by)

    def ended(self, caller: Caller, status: int) -> None:
        """Count a request by the HTTP status of its answer."""
        refused = status in (403, 429)
        self.count(caller, "answered" if status < 400 else "refused" if refused else "failed")

    def _of_address(self, address: str, forwarded: str) -> Caller:
        if not address:
            return ANYONE
        if forwarded and not is_within(address, self.proxies):
            forwarded = ""  # only the word of a proxy counts, and is kept
        if (caller := self.by_address.get((address, forwarded))) is None:
            if len(self.by_address) >= MAX_ADDRESSES:
                self.by_address.clear()
            name = client_of(address, forwarded, self.proxies)
            caller = self.by_address[address, forwarded] = Caller(name)
        return caller


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address belongs to one of the networks; False for text that is no address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any((getattr(ip, "ipv4_mapped", None) or ip) in network for network in networks)


def client_of(address: str, forwarded: str, proxies: Sequence[Network]) -> str:
    """Return the client's address: the nearest that is no trusted proxy's.

    Of IPv6 it is the network of the host, which may use every address there.
    """
    client = ANYONE.name
    for hop in (address, *reversed(forwarded.split(","))):
        try:
            ip = ipaddress.ip_address(hop.strip())
        except ValueError:
            break
        ip = getattr(ip, "ipv4_mapped", None) or ip
        client = str(
            ipaddress.ip_network((ip, OF_HOST_V6), strict=False) if ip.version == 6 else ip
        )
        if not any(ip in network for network in proxies):
            break
    return client


def _by_hash(lines: Iterable[KeyEntry | str]) -> dict[bytes, Caller]:
    entries = (KeyEntry.of("", fields_of(e)) if isinstance(e, str) else e for e in lines)
    return {_digest(entry.key.encode("ascii")): _caller(entry) for entry in entries}


def _caller(entry: KeyEntry) -> Caller:
    burst = entry.burst or max(1.0, entry.rate or 1.0)
    is_admin = not entry.options if entry.admin is None else entry.admin
    limits = (entry.share, entry.lane, entry.sets, is_admin, entry.rate, burst)
    return Caller(entry.name, *limits, has_key=True)


def _digest(key: bytes) -> bytes:
    # Keys are long and random, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(key).digest()


def read_keys(
    path: Path | None,
    counted: Callable[[str, str, float], None] = lambda *_: None,
    proxies: Sequence[Network] = (),
) -> Keys:
    """Return the keys of a file and of TANDEM_API_KEYS; without any, all may call.

    Raises:
        ApiKeyError: a key is too short or malformed, or the file cannot be read. So is a file or
            variable without keys: a service that should have keys does not start without them.
    """
    file = KeyFile(path) if path else None
    text = whole_environment().get(KEYS_VARIABLE)  # set but empty: no keys, which is refused
    entries = [] if text is None else keys_in(BETWEEN_KEYS.sub("\n", text), KEYS_VARIABLE)
    return Keys(entries, file, counted, proxies)


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
