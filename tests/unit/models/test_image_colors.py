"""Pictures in wide-gamut colours: converted to sRGB if that is asked for, and never a fault."""

import io
import struct
import zlib

import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from models import machine
from models.errors import ModelSetError
from models.image import ImageInputs, ImageRule
from models.image_colors import (
    MAX_PROFILE_BYTES,
    PROFILES_VARIABLE,
    embedded_profile,
    is_matrix,
    offline_profiles,
    to_srgb,
)
from models.image_header import ImageHeader, read_header
from models.machine import MissingExtraError
from tests.support.cases import cases
from tests.support.icc_profiles import ADOBE_RGB, DISPLAY_P3, SRGB, matrix_profile
from tests.support.images import encode, make_png, make_scene, png_chunk

PLAIN = ImageInputs({"a": ImageRule(56, 64), "b": ImageRule(24, 28)})
CONVERTED = PLAIN.with_profiles("convert")
P3, ADOBE = matrix_profile(DISPLAY_P3), matrix_profile(ADOBE_RGB, (2.19921875,))
BOUNDED = settings(max_examples=200, deadline=None, database=None)
pillow_heif.register_heif_opener()


def scene() -> Image.Image:
    """Return a smooth picture, which lossy formats keep."""
    small = Image.fromarray(make_scene(90, 70)).resize((6, 5))
    return small.resize((90, 70), Image.Resampling.BICUBIC)


def in_space(profile: bytes) -> Image.Image:
    """Return the scene with the profile's numbers."""
    spaces = ImageCms.createProfile("sRGB"), ImageCms.ImageCmsProfile(io.BytesIO(profile))
    return ImageCms.profileToProfile(scene(), *spaces, ImageCms.Intent.RELATIVE_COLORIMETRIC)


def saved(image: Image.Image, kind: str, profile: bytes | None) -> bytes:
    how = {"lossless": True} if kind == "WEBP" else {"quality": 95}
    return encode(image, kind, icc_profile=profile, **how)


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.int16) - b).mean())


@pytest.mark.parametrize("profile", [P3, ADOBE], ids=["Display P3", "Adobe RGB"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "HEIF", "AVIF"])
def test_the_colours_are_those_of_srgb(kind, profile):
    wide, plain = saved(in_space(profile), kind, profile), saved(scene(), kind, None)
    right = PLAIN.read(plain)
    assert off(CONVERTED.read(wide), right) < 2 < 2.5 < off(PLAIN.read(wide), right)
    np.testing.assert_array_equal(CONVERTED.read(plain), right)


def coded(kind: str, image: Image.Image, primaries: int, transfer: int, more: bytes = b"") -> bytes:
    """Return a file that names its colours by codes: PNG's cICP, or HEIC's and AVIF's nclx."""
    image.info.pop("icc_profile", None)
    if kind == "PNG":
        file = encode(image, kind)
        chunk = png_chunk(b"cICP", bytes([primaries, transfer, 0, 1]))
        return file[:33] + more + chunk + file[33:]
    boxes = bytearray(encode(image, kind, quality=95))
    if (place := boxes.find(b"colrnclx")) > 0:
        struct.pack_into(">HH", boxes, place + 8, primaries, transfer)
        return bytes(boxes)
    raise AssertionError(f"no nclx in {kind}")


@pytest.mark.parametrize("kind", ["PNG", "HEIF", "AVIF"])
def test_codes_of_a_colour_space_are_converted(kind):
    """By right numbers of Display P3, which the tests' own profile makes."""
    right = PLAIN.read(encode(scene(), kind, **({} if kind == "PNG" else {"quality": 95})))
    for transfer in (1, 13):
        wide = coded(kind, in_space(P3), 12, transfer)
        assert off(CONVERTED.read(wide), right) < 2 < 2.5 < off(PLAIN.read(wide), right)
    plain = coded(kind, scene(), 1, 13)
    np.testing.assert_array_equal(CONVERTED.read(plain), PLAIN.read(plain))
    for codes in ((9, 16), (9, 18), (12, 8), (22, 13), (5, 13)):  # HDR, linear, others
        other = coded(kind, scene(), *codes)
        np.testing.assert_array_equal(CONVERTED.read(other), PLAIN.read(other))


def test_codes_come_before_a_profile_if_they_are_known():
    profile = png_chunk(b"iCCP", b"x\0\0" + zlib.compress(ADOBE))
    right = PLAIN.read(encode(scene(), "PNG"))
    assert off(CONVERTED.read(coded("PNG", in_space(P3), 12, 13, profile)), right) < 2
    assert off(CONVERTED.read(coded("PNG", in_space(ADOBE), 9, 16, profile)), right) < 2
    srgb = coded("PNG", scene(), 1, 13, profile)
    np.testing.assert_array_equal(CONVERTED.read(srgb), right)
    file = coded("PNG", in_space(ADOBE), 12, 13, profile)
    of_yuv = file.replace(b"cICP\x0c\x0d\0\1", b"cICP\x0c\x0d\1\1")
    assert off(CONVERTED.read(of_yuv), right) < 2 < off(CONVERTED.read(file), right)


@cases(
    "profile",
    matrix_profile(SRGB),
    ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
    P3.replace(b"mntr", b"prtr"),
    P3.replace(b"RGB XYZ ", b"CMYKLab "),
    P3.replace(b"cprt", b"A2B0"),  # tables come before the matrix
    P3.replace(b"rTRC", b"xTRC"),
    P3[:-40],
    P3[:140],
    P3 + bytes(MAX_PROFILE_BYTES),
    b"profile",
    ids=[
        "sRGB",
        "Pillow's",
        "printer",
        "CMYK",
        "tables",
        "no curve",
        "cut",
        "short",
        "large",
        "no",
    ],
)
def test_other_profiles_change_nothing(profile):
    file = saved(scene(), "JPEG", profile)
    np.testing.assert_array_equal(CONVERTED.read(file), PLAIN.read(file))


def test_a_long_profile_in_segments_is_joined():
    long = P3 + bytes(MAX_PROFILE_BYTES // 2 - len(P3))
    file = saved(in_space(P3), "JPEG", long)
    header = read_header(file)
    assert embedded_profile(memoryview(file), header.format) == long
    with_gap = file.replace(b"ICC_PROFILE\0\1\1", b"ICC_PROFILE\0\2\3", 1)
    assert embedded_profile(memoryview(with_gap), header.format) is None


def test_a_png_that_inflates_is_read_up_to_the_limit():
    bomb = zlib.compress(bytes(10_000_000))
    png = make_png(8, 8, 8, 2, png_chunk(b"iCCP", b"x\0\0" + bomb))
    assert embedded_profile(memoryview(png), "png") is None
    largest = bytes(MAX_PROFILE_BYTES)
    png = make_png(8, 8, 8, 2, png_chunk(b"iCCP", b"x\0\0" + zlib.compress(largest)))
    assert embedded_profile(memoryview(png), "png") == largest
    damaged = make_png(8, 8, 8, 2, png_chunk(b"iCCP", b"x\0\0" + bomb[5:]))
    assert embedded_profile(memoryview(damaged), "png") is None


@BOUNDED
@given(st.data())
def test_spoilt_profiles_are_no_fault(data):
    spoilt = bytearray(P3)
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(spoilt) - 4))
        struct.pack_into(">I", spoilt, place, data.draw(st.integers(0, 2**32 - 1)))
    is_matrix(bytes(spoilt))
    chunk = png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(spoilt)))
    file = memoryview(make_png(1, 1, 8, 2, chunk))
    pixels = np.arange(27, dtype=np.uint8)
    to_srgb(pixels, file, ImageHeader("png", 1, 1))


def test_the_extra_and_the_variable(monkeypatch):
    assert offline_profiles() == "ignore"
    monkeypatch.setenv(PROFILES_VARIABLE, "convert")
    assert offline_profiles() == "convert"
    monkeypatch.setenv(PROFILES_VARIABLE, "yes")
    with pytest.raises(ModelSetError, match="TANDEM_ICC_PROFILES=yes: it is ignore or convert"):
        offline_profiles()
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert PLAIN.with_profiles("ignore") is not PLAIN
    with pytest.raises(MissingExtraError, match=r"convert needs PIL.*'tandem-serve\[color\]'"):
        PLAIN.with_profiles("convert")
