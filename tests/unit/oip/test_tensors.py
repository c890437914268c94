"""Datatypes, shapes and contents of tensors, and every way in which they do not fit."""

import random

import numpy as np
import pytest

from app.errors import BadTensorError
from app.grpc.open_inference_pb2 import InferTensorContents
from app.oip.tensors import (
    SLICE_BYTES,
    Tensor,
    bytes_elements,
    checked_tensor,
    packed_elements,
    uint8_array,
)
from tests.support.cases import cases
from tests.support.open_inference import elements

FLAT = [0, 1, 254, 255]


def uint8(shape, **contents):
    return Tensor("pixels", "UINT8", shape, **contents)


def encoded(shape: tuple[int, ...], raw: bytes) -> Tensor:
    return Tensor("image", "BYTES", shape, raw)


@cases("contents", {"raw": bytes(FLAT)}, {"values": FLAT}, {"values": [[0, 1], [254, 255]]})
def test_pixels_are_an_array_of_the_shape_flat_or_nested(contents):
    array = uint8_array(uint8((2, 2), **contents))
    assert (array.tolist(), array.dtype) == ([[0, 1], [254, 255]], np.uint8)


@cases(
    "values",
    *([0, 1, 2], [0, 1, 2, 3, 4], [[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]]),
    *([[0, 1], 2, 3], [[[0], [1]], [[2], [3]]], [[], []], [], {}, "text", None),
    *([0, 1, 2, last] for last in (256, -1, 3.0, True, "3", None, 2**70)),
    *([["a", "b"], ["c", "d"]], ["ab", "cd"]),
)
def test_json_pixels_that_do_not_fit(values):
    with pytest.raises(BadTensorError, match="pixels"):
        uint8_array(uint8((2, 2), values=values))


def packed_uint8(values, shape, cut=0):
    contents = InferTensorContents(uint_contents=values).SerializeToString()
    start = len(contents) - sum(1 + (value > 0x7F) + (value > 0x3FFF) for value in values)
    return uint8(shape, packed=contents[start : len(contents) - cut])


def test_packed_pixels_are_unpacked_across_slices(monkeypatch):
    values = random.Random(7).choices([0, 1, 127, 128, 200, 255], k=1000)
    for slice_bytes in (3, 64, SLICE_BYTES):
        monkeypatch.setattr("app.oip.tensors.SLICE_BYTES", slice_bytes)
        assert uint8_array(packed_uint8(values, (10, 100))).ravel().tolist() == values


@cases(
    "values, cut, says",
    ([0, 1, 2], 0, "has 3 bytes of packed values"),
    ([1] * 9, 0, "has 9 bytes of packed values"),
    ([1] * 5, 0, "has 5 bytes of packed values"),
    ([0, 200, 2], 0, "has 4 bytes of packed values"),
    ([1, 2, 3, 200], 1, "has 4 bytes of packed values"),
    ([0, 1, 2, 256], 0, "whole numbers from 0 to 255"),
    ([0, 1, 2, 2**20], 0, "whole numbers from 0 to 255"),
)
def test_packed_pixels_that_do_not_fit(values, cut, says):
    with pytest.raises(BadTensorError, match=says):
        uint8_array(packed_uint8(values, (2, 2), cut))


@pytest.mark.parametrize("num_bytes", [0, 3, 5])
def test_raw_pixels_of_another_number(num_bytes):
    with pytest.raises(BadTensorError, match=rf"has {num_bytes} bytes, and its shape \[2, 2\]"):
        uint8_array(uint8((2, 2), raw=bytes(num_bytes)))


def test_elements_of_bytes_come_after_their_lengths():
    raw = elements(b"one", b"", b"three")
    assert bytes_elements(encoded((3,), raw)) == [b"one", b"", b"three"]
    assert bytes_elements(encoded((3, 1), raw)) == [b"one", b"", b"three"]
    assert packed_elements([b"one", b"", b"three"]) == raw


@cases(
    "shape, raw, says",
    ((1,), b"\xff\xff\xff\xffone", "element 0 has 4294967295 bytes by its length, and 3 are"),
    ((1,), b"\x04\0\0\0one", "element 0 has 4 bytes by its length, and 3 are left"),
    ((1,), b"\x03\0\0", "3 bytes, and its shape"),
    ((1,), b"", "0 bytes, and its shape"),
    ((2,), elements(b"one"), "means 8 or more|1 elements"),
    ((2,), elements(b"four!"), "1 elements, and its shape"),
    ((1,), elements(b"one", b"two"), "7 bytes are left over after its 1 elements"),
    ((2**31 - 1,), elements(b"one"), "means 8589934588 or more"),
    ((0,), elements(b"one"), "7 bytes are left over"),
)
def test_elements_that_do_not_fit(shape, raw, says):
    with pytest.raises(BadTensorError, match=says):
        bytes_elements(encoded(shape, raw))


def test_text_is_no_image():
    with pytest.raises(BadTensorError, match="content_type: base64"):
        bytes_elements(Tensor("image", "BYTES", (1,), values=["/9j/4AAQ"]))


@cases(
    "changed, says",
    ({"name": None}, "name is None"),
    ({"name": ""}, "name is ''"),
    ({"name": ["x"]}, "name is"),
    ({"datatype": "uint8"}, "datatype is 'uint8'; there are BOOL"),
    ({"datatype": None}, "datatype is None"),
    ({"datatype": ["UINT8"]}, "datatype is"),
    ({"shape": None}, "shape is None"),
    ({"shape": "12"}, "shape is '12'"),
    ({"shape": [1.0]}, "shape has 1.0"),
    ({"shape": [True]}, "shape has True"),
    ({"shape": [-1]}, "shape has -1"),
    ({"shape": [2**31]}, "more elements than 2147483647"),
    ({"shape": [2**16, 2**16]}, "more elements than"),
    ({"shape": [2**63, 2**63, 2**63]}, "more elements than"),
    ({"shape": [0, 2**63]}, "more elements than"),
    ({"shape": [2**31 - 1, 0, 2**31 - 1, 2**31 - 1]}, "more elements than"),
    ({"shape": [1] * 9}, "9 dimensions, the limit is 8"),
    ({"name": "n" * 10_000, "datatype": "d" * 10_000}, "datatype is"),
)
def test_what_no_tensor_has(changed, says):
    """Errors repeat only the beginning of foreign text."""
    with pytest.raises(BadTensorError, match=says) as refused:
        checked_tensor(**{"name": "x", "datatype": "UINT8", "shape": [1]} | changed)
    assert len(refused.value.message) < 300


@cases(
    "text, is_",
    ("data:image/jpeg;base64,/9j/4AAQ", " .'data:image/.* is a data URL.;"),
    (str(b"\xff\xd8\xff\xe0"), " .*is the text that Python writes of bytes.;"),
    ("_9j_4AAQ", " .'_9j_4AAQ' is base64.;"),
    ("https://host.invalid/a.jpg", " .*is an address, and the service fetches nothing.;"),
    ("cat", ";"),
    (None, ";"),
)
def test_a_text_in_place_of_an_image_is_named(text, is_):
    tensor = Tensor("image", "BYTES", (1,), values=[text])
    with pytest.raises(BadTensorError, match=f"text, which no encoded image is{is_} send them in"):
        bytes_elements(tensor)
