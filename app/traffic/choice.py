"""Chooses a request's version so that the same photo, or the same caller, keeps its version.

The method is weighted rendezvous hashing. Each version draws a number from the hash of the key and
of its own name; the version with the lowest draw divided by its share answers. If one version's
share grows, keys move only to that version.
"""

import hashlib
import math
from collections.abc import Mapping

HASHED_BYTES = 64 * 2**10  # The beginning of a file and its length suffice to tell photos apart.


def sticky_key(value: str | None, data: bytes) -> bytes:
    """Return a hash of the header's ``value``, or of the file ``data`` if there is no header."""
    if value is not None:
        return hashlib.blake2b(value.encode("utf-8", "replace"), digest_size=16).digest()
    digest = hashlib.blake2b(data[:HASHED_BYTES], digest_size=16)
    digest.update(len(data).to_bytes(8, "little"))
    return digest.digest()


def chosen(key: bytes, shares: Mapping[str, float]) -> str:
    """Return the version that answers a key: each is chosen in proportion to its share."""
    draws = {name: _draw(key, name) / share for name, share in shares.items() if share > 0}
    return min(draws, key=draws.__getitem__)


def _draw(key: bytes, name: str) -> float:
    """Return an exponentially distributed number that the key and the name determine."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / 2**64)
