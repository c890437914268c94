"""Recognises image formats by their first bytes.

Signatures are from each format's specification; those of boxes (HEIC, AVIF) are the brands
registered at mp4ra.org.
"""

import re
from importlib.util import find_spec

DECODED = ("jpeg", "png", "webp")
HAS_HEIF = find_spec("pillow_heif") is not None  # the extra heif, for HEIC and AVIF
KINDS = "JPEG, PNG, WebP, HEIC or AVIF" if HAS_HEIF else "JPEG, PNG or WebP"  # to be sent
OF_THE_EXTRA = {"HEIC": "heic", "HEIF": "heic", "AVIF": "avif"}  # by name; ImageHeader's names

_SIGNATURES: dict[str, tuple[bytes, ...]] = {
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
    "JPEG XR": (b"II\xbc\x01",),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\x00\x00\x00\x0cJXL \r\n\x87\n", b"\xff\x0a"),
    "PDF": (b"%PDF-",),
    "PostScript": (b"%!PS",),
    "PSD": (b"8BPS",),
    "QOI": (b"qoif",),
    "OpenEXR": (b"\x76\x2f\x31\x01",),
    "Radiance HDR": (b"#?RADIANCE",),
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIC"),
    **dict.fromkeys((b"mif1", b"msf1", b"mif2"), "HEIF"),
}
# Zero, a type, and the number of pictures, at least 1.
_ICON = re.compile(rb"\x00\x00([\x01\x02])\x00(?!\x00\x00)")
# TGA has no signature. Its header: the length of a text; without a colour map (zeros) a true-colour
# or grey picture, or with one; the origin; width and height above 0; bits per pixel.
_TGA = re.compile(
    rb".(?:\x00[\x02\x03\x0a\x0b]\x00{5}|\x01[\x01\x09].{4}[\x0f\x10\x18\x20]).{4}"
    rb"(?!\x00\x00)..(?!\x00\x00)..[\x08\x0f\x10\x18\x20]",
    re.S,
)
_PORTABLE_ANYMAP = re.compile(rb"P[1-7]\s[\s\d#]")
# An XML prologue, comments or a doctype may come first, in the first KB.
_SVG = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*<(?:svg\b|(?:\?xml|!--|!DOCTYPE)(?s:.){,1000}<svg\b)", re.I
)
# Sizes of the BMP information headers in use (OS/2 1.x, 3.x, and Windows 3 to 5), at byte 14.
_BMP_HEADERS = frozenset({12, 16, 40, 52, 56, 64, 108, 124})


def name_format(view: memoryview) -> str | None:
    """Return one of ``DECODED``, the name of a format that is not decoded, or None if unknown."""
    start = bytes(view[:1100])
    for name, signatures in _SIGNATURES.items():
        if start.startswith(signatures):
            return name
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[4:8] == b"ftyp":
        brand = _BRANDS.get(start[8:12])
        return _refined(start) if brand == "HEIF" else brand
    if start[:2] == b"BM" and int.from_bytes(start[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    if icon := _ICON.match(start):
        return "ICO" if icon[1] == b"\1" else "CUR"
    if _TGA.match(start):
        return "TGA"
    if _PORTABLE_ANYMAP.match(start):
        return "PNM"
    return "SVG" if _SVG.match(start) else None


def _refined(start: bytes) -> str:
    """Return the format of a file with HEIF's general brand, by its compatible brands."""
    end = min(int.from_bytes(start[:4]), len(start))
    names = {_BRANDS.get(start[place : place + 4]) for place in range(16, end, 4)}
    return next((name for name in ("HEIC", "AVIF") if name in names), "HEIF")
