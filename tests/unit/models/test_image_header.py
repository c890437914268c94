"""What a file says about itself is read right, and cheaply, whatever its bytes."""

import base64
import gzip
import io
import pickle
import struct
import sys
import time
import zipfile
import zlib
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from PIL import Image

from models.errors import CorruptImageError, NotAnImageError, UnsupportedFormatError
from models.image_files import KINDS
from models.image_header import read_header
from tests.support import images
from tests.support.cases import cases

MAX_HEADER_S = 0.5  # generous: a hostile file costs milliseconds, never a scan per byte in Python


@cases(
    "kind, options",
    *(("JPEG", o) for o in ({}, {"progressive": True}, {"icc_profile": b"p" * 200_000})),
    *(("WEBP", o) for o in ({}, {"lossless": True}, {"exif": Image.Exif()})),
    ("PNG", {}),
)
@pytest.mark.parametrize("has_alpha", [False, True])
def test_each_format(kind, options, has_alpha):
    scene = Image.fromarray(images.make_scene(37, 21))
    if has_alpha and kind != "JPEG":
        scene.putalpha(Image.fromarray(images.make_alpha(37, 21)))
    header = read_header(images.encode(scene, kind, **options))
    assert (header.format, header.width, header.height) == (kind.lower(), 37, 21)
    assert header.has_many_scans is options.get("progressive", False)
    assert header.has_alpha is (has_alpha and kind != "JPEG")
    assert (header.bit_depth, header.transparent_gray) == (8, None)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 8, 0, 9, 40_000])
def test_orientation_which_is_ignored_out_of_range(kind, orientation):
    data = images.with_orientation(images.make_scene(9, 9), kind, orientation)
    assert read_header(data).orientation == (orientation if 1 <= orientation <= 8 else 1)


def test_webp_orientation_behind_a_chunk_of_odd_length():
    exif = Image.Exif()
    exif[0x0112] = 5
    body = exif.tobytes()
    chunks = b"VP8X\x0a\0\0\0\x08\0\0\0" + b"\7\0\0\5\0\0" + b"ICCP\3\0\0\0abc\0"
    chunks += b"EXIF" + struct.pack("<I", len(body)) + body
    header = read_header(b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks)
    assert (header.width, header.height, header.orientation) == (8, 6, 5)


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_damaged_exif_is_ignored(cut):
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = images.png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")[:cut])
    data = images.encode(images.make_scene(9, 9), "PNG")
    assert read_header(data[:33] + chunk + data[33:]).orientation in (1, 6)


PHOTO = images.encode(images.make_scene(30, 20), "JPEG")
IN_BASE64 = base64.b64encode(PHOTO)
AS_TENSOR = 'the input "pixels"'


def saved(array) -> bytes:
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


@cases(
    "data, says",
    (
        b"photo.jpg",
        "the text 'photo.jpg', not an image: .*--data-binary @photo.jpg does, with an @",
    ),
    (b"Photos/Cat.PNG\n", "the text 'Photos/Cat.PNG"),
    (b'{"instances": []}', "JSON.*--data-binary"),
    (b"\xef\xbb\xbf [1, 2]", "JSON"),
    (b"data:image/jpeg;base64," + IN_BASE64, "a data URL"),
    (IN_BASE64, "base64"),
    (b"image=" + IN_BASE64, "urlencoded"),
    (urlencode({"files[]": IN_BASE64}).encode().replace(b"%5B%5D", b"[]"), "urlencoded"),
    (str(PHOTO).encode(), "the text that Python writes of bytes"),
    (b"--x\r\nContent-Disposition: form-data\r\n\r\n" + PHOTO, "a form without.*curl -F"),
    (saved(np.zeros((3, 5), np.uint8)), f"NumPy array.*{AS_TENSOR}"),
    *((pickle.dumps([PHOTO], protocol), f"pickle.*{AS_TENSOR}") for protocol in (2, 3, 4, 5)),
    *((pickle.dumps(value, n), "pickle") for value in ({"a": 1}, [PHOTO]) for n in (0, 1, 5)),
    *((pickle.dumps(PHOTO, protocol), "pickle") for protocol in (2, 3, 4, 5)),
    (bytes(224 * 224 * 3), f"as many as 224 x 224 pixels without a format.*{AS_TENSOR}"),
    (bytes(640 * 480 * 3), f"as many as 640 x 480 pixels without a format.*{AS_TENSOR}"),
    (bytes(1080 * 1920 * 3), "as many as 1440 x 1440 or 1920 x 1080 pixels"),
    (bytes(90 * 60 * 4), "as many as 90 x 60 pixels"),
    (b"top_k=5&image=" + quote(IN_BASE64, safe="").encode(), "urlencoded"),
    (urlencode({"image": PHOTO}).encode(), "urlencoded"),
    (b'"' + IN_BASE64 + b'"', "base64"),
    (IN_BASE64.replace(b"/", b"_"), "base64"),
    (str(bytearray(PHOTO)).encode(), "the text that Python writes of bytes"),
    (PHOTO.hex().encode(), "hexadecimal text"),
    (PHOTO.decode("utf-8", "replace").encode(), "a file that was read as text.*read it as bytes"),
    (PHOTO.decode("latin-1").encode(), "a file that was read as text"),
    (gzip.compress(PHOTO), "compressed .*Content-Encoding: gzip"),
    (zlib.compress(PHOTO), "compressed"),
    (zipped("a.jpg", PHOTO), "compressed"),
    (zipped("a.npy", b""), f"NumPy arrays.*{AS_TENSOR}"),
    (b"[object FormData]", "JavaScript's text of an object"),
    (b"array([[[1, 2, 3]", f"the text of an array.*{AS_TENSOR}"),
    (b"https://example.org/a?b=c", "an address, and the service fetches nothing"),
    ids=lambda value: "" if isinstance(value, bytes) else value[:20],
)
def test_what_an_image_is_wrapped_in_is_named(data, says):
    with pytest.raises(NotAnImageError, match=says):
        read_header(data)


@cases(
    "data, says",
    (b"", "empty.* send a JPEG, PNG, WebP, HEIC or AVIF image"),
    (b"text", "no image.* send a JPEG, PNG, WebP, HEIC or AVIF image"),
    (b"<html><body>not found</body></html>", "no image"),
    (b"BM is how this text begins", "no image"),
    (b"RIFF\x10\0\0\0WAVEfmt ", "no image"),
    (b"\0\0\0\x20ftypisom", "no image"),
    (b"\0\0\2\0\0\0no cursor: it has none", "no image"),
    (b"# Tandem\n" * 99, r"^The 891 bytes are no image \(they begin \"# Tandem\"\): send a JP"),
    (b"a\n\tlist of", r"\(they begin \"a list\"\): "),
    (b"\x7fELF\x02\x01\x01\x00", r"\(they begin 7f 45 4c 46 02 01 01 00\): send a JPEG, PNG"),
)
def test_other_bytes_are_no_image_which_is_told_without_a_programs_notation(data, says):
    with pytest.raises(NotAnImageError, match=says) as raised:
        read_header(data)
    assert "b'" not in raised.value.message


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "ICO", "PDF", "JPEG2000", "PPM"])
def test_formats_that_pillow_writes_but_are_not_decoded(kind):
    data = images.encode(images.make_scene(40, 40), kind)
    name = {"JPEG2000": "JPEG 2000", "PPM": "PNM"}.get(kind, kind)
    with pytest.raises(UnsupportedFormatError, match=rf"^{name} is not decoded: send {KINDS}\.$"):
        read_header(data)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
@pytest.mark.parametrize("compression", [None, "tga_rle"])
def test_tga_is_not_taken_for_a_cursor(mode, compression):
    data = images.encode(
        Image.fromarray(images.make_scene(40, 30)).convert(mode), "TGA", compression=compression
    )
    with pytest.raises(UnsupportedFormatError, match=r"^TGA is not decoded"):
        read_header(data[:-26])  # without its footer


@cases(
    "data, name",
    (b"\0\0\2\0\1\0\x20\x20\0\0\1\0\1\0", "CUR"),
    (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- a drawing -->\n<svg width="1">', "SVG"),
    (b"\xff\x0a\xfa\x7f", "JPEG XL"),
    (b"8BPS\0\x01", "PSD"),
    (b"MM\0*\0\0\0\x08", "TIFF"),
)
def test_formats_known_by_their_first_bytes(data, name):
    with pytest.raises(UnsupportedFormatError, match=f"^{name} is not decoded"):
        read_header(data)


@cases("brand, name", (b"heic", "HEIC"), (b"mif1", "HEIF"), (b"avis", "AVIF"))
def test_what_an_extra_decodes_is_not_decoded_without_it(brand, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as if it were not installed
    says = rf"^{name} is not decoded: send JPEG, PNG or WebP, .* 'tandem-serve\[heif\]'"
    with pytest.raises(UnsupportedFormatError, match=says):
        read_header(b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0")


@cases(
    "kind, marker, offset, num_replaced, other, says",
    ("JPEG", b"\xff\xc0", 1, 1, b"\xc3", "Lossless or hierarchical"),
    ("JPEG", b"\xff\xc0", 1, 1, b"\xf7", "Lossless or hierarchical"),
    ("JPEG", b"\xff\xc0", 4, 1, b"\x0c", "12 bits"),
    ("PNG", b"IDAT", -4, 0, images.png_chunk(b"ABCD", b""), "critical chunk b'ABCD'"),
)
def test_rare_processes_depths_and_chunks(kind, marker, offset, num_replaced, other, says):
    data = images.encode(images.make_scene(20, 20), kind)
    at = data.index(marker) + offset
    with pytest.raises(UnsupportedFormatError, match=says):
        read_header(data[:at] + other + data[at + num_replaced :])


@cases(
    "frame, is_progressive", (0xC0, False), (0xC1, False), (0xC2, True), (0xC9, False), (0xCA, True)
)
def test_the_frames_that_are_decoded(frame: int, is_progressive: bool) -> None:
    """Baseline, extended and progressive, with Huffman's coding or an arithmetic one."""
    data = images.encode(images.make_scene(20, 10), "JPEG").replace(
        b"\xff\xc0\x00", b"\xff%c\x00" % frame, 1
    )
    header = read_header(data)
    assert (header.width, header.height, header.has_many_scans) == (20, 10, is_progressive)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_header_cut_anywhere_is_corrupt_or_no_image(kind):
    data = images.encode(images.make_scene(20, 20), kind)
    end = {"JPEG": data.find(b"\xff\xda"), "PNG": data.find(b"IDAT"), "WEBP": 29}[kind]
    for cut in range(1, end):
        with pytest.raises((CorruptImageError, NotAnImageError)):
            read_header(data[:cut])


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_no_pixels_is_corrupt(width, height):
    jpeg = images.encode(images.make_scene(20, 20), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]
    for data in (jpeg, images.make_png(width, height, 8, 2, images.png_chunk(b"IDAT", b""))):
        with pytest.raises(CorruptImageError, match=f"{width} x {height} pixels"):
            read_header(data)


@cases(
    "data, kind",
    (bytes(40_000_000), NotAnImageError),
    (b"\xff\xd8" + b"\xff" * 10_000_000, CorruptImageError),
    (b"\xff\xd8\xff\xfe\0\2" + bytes(10_000_000), CorruptImageError),
    (b"\xff\xd8" + b"\xff\xfe\0\2" * 2_500_000, CorruptImageError),
    (b"\xff\xd8" + b"\xff\xd0" * 5_000_000, CorruptImageError),
    (images.make_png(9, 9, 8, 2, images.png_chunk(b"tEXt", b"") * 800_000), CorruptImageError),
    ids=["nothing", "fill bytes", "zeros", "tiny comments", "restarts", "tiny PNG chunks"],
)
def test_hostile_headers_cost_little(data, kind):
    start = time.process_time()
    with pytest.raises(kind):
        read_header(data)
    assert time.process_time() - start < MAX_HEADER_S


def test_bytes_between_jpeg_segments_are_skipped_and_a_thumbnail_is_not_the_picture():
    thumbnail = images.encode(np.zeros((5, 5, 3), np.uint8), "JPEG")
    data = images.encode(images.make_scene(20, 30), "JPEG", comment=thumbnail)
    for file in (data, data[:20] + b"\x00\x07junk" + data[20:]):  # after JFIF's, as libjpeg does
        assert (read_header(file).width, read_header(file).height) == (20, 30)
