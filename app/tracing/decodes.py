"""Spans of the Decoder: one for each image, with the file's format and size."""

from typing import NamedTuple

from app.messages import Fault
from app.tracing.parents import Parent
from app.tracing.spans import Value, record
from models.image_header import ImageHeader


class DecodedFile(NamedTuple):
    """What became of one file; times are by ``time.monotonic``."""

    num_bytes: int
    started: float
    ended: float
    header: ImageHeader | None  # None: it cannot be read, or nobody asks for it
    fault: Fault | None


def record_decode(parent: Parent, index: int, file: DecodedFile) -> None:
    """Record one image's span; its size in pixels is that of the file, before resizing."""
    facts: dict[str, Value] = {"tandem.image": index, "tandem.bytes": file.num_bytes}
    if file.header is not None:
        facts |= {"tandem.format": file.header.format}
        facts |= {"tandem.width": file.header.width, "tandem.height": file.header.height}
    error = file.fault.message if file.fault else None
    record("decode", parent, file.started, file.ended, facts, error=error)
