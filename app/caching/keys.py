"""Keys of images: a hash of the file's bytes and of everything else that its answer depends on."""

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from app.settings import Settings
from models.model_set import ModelSet

FORMAT = 1  # version of keys and values; raise it when equal bytes would get another answer
KEY_BYTES = 32
# BLAKE2b hashes 1 MiB in about 1 ms (python -m timeit -s "import hashlib; d = bytes(2**20)"
# "hashlib.blake2b(d)"). Up to this size, hashing blocks the loop no longer than a hit may cost.
HASHED_ON_LOOP_BYTES = 256 * 2**10
# They compute pixels and probabilities; "" for what is not installed.
LIBRARIES = ("opencv-python-headless", "pillow", "pillow-heif", "openvino", "onnxruntime")


class ImageKeys:
    """Makes keys of 32 bytes; any other model set, precision or limit gives other keys.

    ``functions`` are the identities of the operator's own functions, if any.
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
            settings.cascade_margin,  # decides which images have answers of all members
            settings.max_pixels,  # decides which images have answers
            settings.max_full_pixels,
            *map(_version_of, LIBRARIES),
            *functions,
        )
        self._context = hashlib.blake2b(repr(context).encode(), digest_size=64).digest()

    async def of(self, files: Sequence[bytes]) -> list[bytes]:
        """Return a key per file; many bytes are hashed on a thread, to keep the loop free."""
        if sum(map(len, files)) <= HASHED_ON_LOOP_BYTES:
            return [self.key(data) for data in files]
        return await asyncio.to_thread(lambda: [self.key(data) for data in files])

    def key(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self._context).digest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # installed from another package
        return ""
