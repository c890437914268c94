"""Walks a PNG's chunks, and makes a PNG for OpenCV with the default picture's chunks only.

OpenCV would refuse metadata of 8 MB, show an animation's first frame instead of its default
picture, and check IEND's checksum. The picture does not depend on any of these.
"""

import struct
from collections.abc import Iterator

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Encoders write at least 8 KB of pixels per chunk; many tiny chunks are an attack.
_MAX_CHUNKS = 2**16
_read_chunk = struct.Struct(">I4s").unpack_from  # length and kind
_PIXELS = frozenset({b"IDAT"})
_BEFORE_PIXELS = _PIXELS | {b"IHDR", b"PLTE", b"tRNS"}
_END = b"\0\0\0\0IEND\xaeB`\x82"


def png_chunks(view: memoryview, position: int = 8) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start of the body, end of the checksum) of each chunk that begins in the file.

    The last chunk may end after the file. Checksums are not verified.
    """
    last = view.nbytes - 8  # the last place for a chunk's length and kind
    for _ in range(_MAX_CHUNKS):
        if position > last:
            return
        length, kind = _read_chunk(view, position)
        start, position = position + 8, position + 12 + length
        yield kind, start, position


def has_png_end(view: memoryview, position: int) -> bool:
    """Whether all chunks from ``position`` up to IEND are complete."""
    for kind, _, end in png_chunks(view, position):
        if kind == b"IEND":
            return end <= view.nbytes
    return False


def default_picture(view: memoryview) -> memoryview | bytes:
    """Return a PNG of the file's IHDR, PLTE, tRNS and IDAT: an animation's default picture.

    PLTE and tRNS only count before the pixels, by the specification. A file that begins with these
    and IEND is not copied.
    """
    spans = [slice(0, 8)]
    wanted = _BEFORE_PIXELS
    for kind, start, end in png_chunks(view):
        if kind == b"IDAT":
            wanted = _PIXELS
        elif kind == b"IEND":
            if len(spans) == 1 and view[start - 8 : end] == _END:
                return view[:end]
            break
        if kind not in wanted:
            continue
        if spans[-1].stop == start - 8:  # adjacent chunks are copied in one piece
            spans[-1] = slice(spans[-1].start, end)
        else:
            spans.append(slice(start - 8, end))
    return b"".join([*(view[span] for span in spans), _END])
