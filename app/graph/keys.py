"""API keys: reads them, and checks those of requests in constant time."""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from app.access import (
    ApiKeyError,
    file_stamp,
    keys_in,
    name_and_key,
    read_key_file,
    readable_by_others,
)
from app.environment import KEYS_VARIABLE, whole_environment
from app.errors import UnauthorizedError
from app.telemetry.metric_table import KEY_REQUESTS
from app.telemetry.metrics import meter

logger = logging.getLogger("ray.serve")
UNNAMED = "unnamed"  # the metric's label for a key without a name
LOOK_EVERY_S = 1.0


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
                self._read_again()
        return self._names

    def _read_again(self) -> None:
        try:
            self._names = self._read()
            logger.info("%s changed: %d keys are accepted now", self._path, len(self._names))
        except ApiKeyError as error:
            logger.error("%s; the previous keys stay valid until it is fixed", error.message)

    def _read(self) -> dict[bytes, str]:
        names = _by_hash(read_key_file(self._path))
        if warning := readable_by_others(self._path):
            logger.warning(warning)
        return names


class Keys:
    """The accepted keys. Only their hashes are kept, so that no message can show a key."""

    def __init__(self, lines: Iterable[str], file: KeyFile | None = None) -> None:
        """Accept the keys of ``lines``, each ``KEY`` or ``NAME:KEY``, and those of ``file``."""
        self._fixed, self._file = _by_hash(lines), file

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

        Admitted requests are counted by the key's name. Without keys every request is admitted.
        """
        if not self:
            return
        scheme, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if scheme.lower() == "bearer":
            name = self.name_of(key.strip().encode("utf-8", "replace"))
            if name is not None:
                meter.count(KEY_REQUESTS, key=name)
                return
        error = UnauthorizedError(
            "the key is none of this service's keys"
            if sent
            else "this service requires an API key: send the header Authorization: Bearer KEY"
        )
        error.is_given = bool(sent)
        raise error


def _by_hash(lines: Iterable[str]) -> dict[bytes, str]:
    parts = map(name_and_key, lines)
    return {_digest(key.encode("ascii")): name or UNNAMED for name, key in parts}


def _digest(key: bytes) -> bytes:
    # Keys are long and random, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(key).digest()


def read_keys(path: Path | None) -> Keys:
    """Return the keys of a file and of TANDEM_API_KEYS; without any, all may call.

    Raises:
        ApiKeyError: a key is too short or malformed, or the file cannot be read. So is a file or
            variable without keys: a service that should have keys does not start without them.

    """
    file = KeyFile(path) if path else None
    text = whole_environment().get(KEYS_VARIABLE)  # set but empty: no keys, which is refused
    lines = [] if text is None else keys_in(text.replace(",", "\n"), KEYS_VARIABLE)
    return Keys(lines, file)
