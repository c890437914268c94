"""Regions of shared memory in folders of the test, and files as clients make them."""

from pathlib import Path
from typing import Any

from app.oip.regions import Regions
from tests.support.open_inference import with_header


class Memory:
    """Regions, the folder of their entries, and the one that stands for /dev/shm."""

    def __init__(self, folder: Path) -> None:
        self.entries, self.folder = folder / "entries", folder / "shm"
        self.entries.mkdir()
        self.folder.mkdir()
        self.regions = self.of_another_gateway()

    def of_another_gateway(self) -> Regions:
        """Return what a second process of the same run has."""
        return Regions(self.entries, self.folder)

    def file(self, key: str, data: bytes) -> Path:
        place = self.folder / key
        place.write_bytes(data)
        return place

    def region(self, data: bytes, name: str = "r", key: str = "k") -> Path:
        """Make a file, and register all of it."""
        place = self.file(key, data)
        self.regions.register(name, key, 0, len(data))
        return place


def in_region(byte_size: int, region: str = "r", offset: int | None = None) -> dict[str, Any]:
    """Return the parameters of a tensor that is in a region."""
    told: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    return told if offset is None else {**told, "shared_memory_offset": offset}


def image_in(parameters, shape=(1,), outputs=(), **more):
    """Return a request of encoded images, or what ``more`` says, in a region."""
    tensor = {"name": "image", "datatype": "BYTES", "shape": shape, **more}
    fields = {"inputs": [{**tensor, "parameters": parameters}]}
    return with_header(fields | ({"outputs": outputs} if outputs else {}))
