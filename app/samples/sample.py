"""A sample: the file of an image as its client sent it, and the answer to it."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from app.responses import Classified, answer_values
from models.image_formats import name_format

DIGEST_BYTES = 8
SUFFIXES = {"jpeg": "jpg", "HEIF": "heic", None: "bin"}  # other formats: their name
DISAGREES = "disagrees"  # the key of another version's answer


@dataclass(frozen=True, slots=True)
class Sample:
    """Two files of the same stem: the image, and the answer as JSON."""

    stem: str  # begins with the time, so that names are in the order of arrival
    suffix: str
    image: bytes
    text: bytes

    @property
    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Names and contents; the image first, so that it exists when the answer's file does."""
        return (f"{self.stem}.{self.suffix}", self.image), (f"{self.stem}.json", self.text)

    @property
    def num_bytes(self) -> int:
        return len(self.image) + len(self.text)


def digest(request_id: str, place: int) -> bytes:
    """Return a hash of an image's request id and its place in the request."""
    return hashlib.blake2b(f"{place} {request_id}".encode(), digest_size=DIGEST_BYTES).digest()


def is_chosen(request_id: str, place: int, ratio: float) -> bool:
    """Whether an image is sampled, by its hash: ``ratio`` of all are, in every process the same."""
    return int.from_bytes(digest(request_id, place)) < ratio * (1 << 8 * DIGEST_BYTES)


def sample_of(
    image: bytes, answer: Classified, place: int, when: datetime, other: Classified | None = None
) -> Sample:
    """Return the sample of the ``place``-th image of a request, answered at ``when``.

    The answer is as the client got it, with as many classes as the client asked for. ``other`` is
    the answer to a copy by a version that disagrees.
    """
    when = when.astimezone(UTC)
    stem = f"{when:%Y%m%dT%H%M%S%f}-{digest(answer.request_id, place).hex()}"
    kind = name_format(memoryview(image))
    suffix = SUFFIXES.get(kind) or str(kind).lower()
    content = {
        "file": f"{stem}.{suffix}",
        "time": when.isoformat(timespec="milliseconds"),
        "image": place,
        **_without_timings(answer),
    }
    if other is not None:
        content[DISAGREES] = _without_timings(other)
    return Sample(stem, suffix, image, orjson.dumps(content))


def _without_timings(answer: Classified) -> dict[str, object]:
    values = answer_values(answer)
    del values["timings_ms"]
    return values
