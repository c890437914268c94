"""API keys: who may call the service, compared in constant time."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Sequence

from app.access.api_keys import keys_in, read_key_file, readable_by_others
from app.environment import KEYS_VARIABLE, keys_of_environment
from app.errors import UnauthorizedError
from app.settings import Settings

logger = logging.getLogger("ray.serve")


class Keys:
    """The keys that are accepted, as hashes; nothing here can tell one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple({_digest(key.encode("ascii")) for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def know(self, key: bytes) -> bool:
        """Tell whether ``key`` is one of them, in the same time whichever it is."""
        digest, is_known = _digest(key), False
        for own in self._digests:
            is_known |= hmac.compare_digest(own, digest)
        return is_known

    def check(self, sent: Sequence[str]) -> None:
        """Raise :class:`UnauthorizedError` unless the one header has a key; without keys never."""
        if not self:
            return
        scheme, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if scheme.lower() == "bearer" and self.know(key.strip().encode("utf-8", "replace")):
            return
        error = UnauthorizedError(
            "that is none of this service's keys"
            if sent
            else "this service wants a key: send the header Authorization: Bearer KEY"
        )
        error.is_given = bool(sent)
        raise error


def _digest(key: bytes) -> bytes:
    # Keys are long and random, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(key).digest()


def read_keys(settings: Settings) -> Keys:
    """Return the keys of the settings' file and of TANDEM_API_KEYS; none: everybody may call.

    Raises:
        ApiKeyError: one is too short or no key, the file cannot be read, or a place that is named
            holds none: a service that should have had keys does not start without.

    """
    keys: list[str] = []
    if path := settings.api_keys_file:
        keys += read_key_file(path)
        if warning := readable_by_others(path):
            logger.warning(warning)
    if (text := keys_of_environment()) is not None:
        keys += keys_in(text.replace(",", "\n"), KEYS_VARIABLE)
    return Keys(keys)
