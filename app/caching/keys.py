"""Keys of images: a hash of the file's bytes and of everything else that its answer depends on."""

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from app.settings import Settings
from models.model_set import ModelSet

FORMAT = 1  # of keys and values; another one whenever the same bytes would be answered otherwise
KEY_BYTES = 32
# BLAKE2b hashes 1 MiB in some 1 ms (python -m timeit -s "import hashlib; d = bytes(2**20)"
# "hashlib.blake2b(d)"): up to here the loop is held for no longer than a hit may cost.
HASHED_ON_LOOP_BYTES = 256 * 2**10
LIBRARIES = ("opencv-python-headless", "openvino")  # make pixels and probabilities


class ImageKeys:
    """Makes keys of 32 bytes; those of another model set, precision or limit differ in all bits.

    Args:
        settings: the application's.
        model_set: the set that is served.
        functions: what tells the operator's own functions from others, if there are some.

    """

    def __init__(
        self, settings: Settings, model_set: ModelSet, functions: Sequence[str] = ()
    ) -> None:
        self.fingerprint = model_set.fingerprint(settings.served_precision)
        context = (
            FORMAT,
            model_set.name,
            self.fingerprint,
            settings.served_precision,
            settings.cascade_margin,  # which images have answers of all members
            settings.max_pixels,  # which have answers at all
            settings.max_full_pixels,
            *map(_version_of, LIBRARIES),
            *functions,
        )
        self._context = hashlib.blake2b(repr(context).encode(), digest_size=64).digest()

    async def of(self, files: Sequence[bytes]) -> list[bytes]:
        """Return a key per file; many bytes are hashed on a thread, so that the loop goes on."""
        if sum(map(len, files)) <= HASHED_ON_LOOP_BYTES:
            return [self.key(data) for data in files]
        return await asyncio.to_thread(lambda: [self.key(data) for data in files])

    def key(self, data: bytes) -> bytes:
        """Return the key of one file."""
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self._context).digest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # installed in another way
        return ""
