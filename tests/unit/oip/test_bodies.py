"""Bodies of inference requests over HTTP: where the JSON ends, and what is in it."""

import json
from typing import Any

import numpy as np
import pytest

from app.errors import BadTensorError, BodyTooLargeError
from app.oip.bodies import MAX_JSON_BYTES, InferAnswer, OutputTensor, Prediction, parse_request
from app.oip.tensors import InferRequest, RegionSlice, RequestedOutput, bytes_elements, uint8_array
from tests.support.cases import cases
from tests.support.open_inference import HEADER_LENGTH, Sent, binary_request, elements, with_header

NO_DATA = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2]}
PIXELS = {**NO_DATA, "data": [7, 8]}
IN_REGION: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 2}
TWICE: dict[str, Any] = {**IN_REGION, "binary_data_size": 2}
NO_NUMBERS = ["-1", "x", "", "1.0", "+1", " 2", "0x10", "²", "1e3", "1_0"]
NO_JSON = [b"", b"{", b"\xff\xd8\xff", b"[" * 5000, b'{"inputs": [NaN]}']
ROWS = [[0.75, 0.5], [0.25, 0.5]]


def parsed(sent: Sent) -> InferRequest:
    body, headers = sent
    return parse_request(body, headers.get(HEADER_LENGTH))


def test_binary_data_come_after_the_json_one_after_the_other():
    request = parsed(binary_request(elements(b"one", b"two"), shape=[2, 1], id="mine"))
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("image", "BYTES", (2, 1))
    assert bytes_elements(tensor) == [b"one", b"two"]
    assert (request.id, request.outputs) == ("mine", ())
    sizes = ((1, None), (2, 2), (3, 3))
    tensors = [
        {"name": f"t{number}", "datatype": "UINT8", "shape": [number]}
        | ({"data": [9]} if size is None else {"parameters": {"binary_data_size": size}})
        for number, size in sizes
    ]
    request = parsed(with_header({"inputs": tensors}, b"abcde"))
    assert [uint8_array(tensor).tobytes() for tensor in request.inputs] == [b"\x09", b"ab", b"cde"]


def test_outputs_are_binary_by_themselves_the_request_or_the_raw_form():
    request = parse_request(b"an image", "0")
    (tensor,) = request.inputs
    assert (tensor.name, tensor.shape, bytes_elements(tensor)) == ("image", (1,), [b"an image"])
    assert request.wants_binary
    outputs: list[dict[str, Any]] = [{"name": "a"}]
    outputs += [{"name": "b", "parameters": {"binary_data": False, "classification": 3}}]
    fields = {"inputs": [PIXELS], "outputs": outputs, "parameters": {"binary_data_output": True}}
    expected = (RequestedOutput("a", True), RequestedOutput("b", False, 3))
    assert parsed(with_header(fields)).outputs == expected


def test_tensors_in_regions_have_no_data():
    output = {"name": "label", "parameters": {**IN_REGION, "shared_memory_offset": 6}}
    fields = {"inputs": [{**NO_DATA, "parameters": IN_REGION}, PIXELS], "outputs": [output]}
    request = parsed(with_header(fields))
    assert request.inputs[0].region == RegionSlice("r", 2)
    assert uint8_array(request.inputs[1]).tolist() == [[7, 8]]
    assert request.outputs == (RequestedOutput("label", region=RegionSlice("r", 2, 6)),)
    assert request.uses_regions
    without = parse_request(json.dumps({"inputs": [PIXELS]}).encode(), None)  # all is JSON
    assert uint8_array(without.inputs[0]).tolist() == [[7, 8]]
    assert not without.uses_regions


@cases(
    "body, length, says",
    *((b"{}", length, "is the number of bytes of JSON") for length in NO_NUMBERS),
    *((b"{}", length, "the body has 2 bytes") for length in ("3", "4294967296", "9" * 5000)),
    *((body, None, "is no JSON") for body in NO_JSON),
)
def test_what_is_no_json_or_does_not_say_where_it_ends(body, length, says):
    with pytest.raises(BadTensorError, match=says) as refused:
        parse_request(body, length)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("depth", [100, 1000, 1020, 100_000])
@cases("place", "inputs", "outputs", "parameters", "id", "name", "datatype", "shape", "data")
def test_deep_json_is_refused_as_any_other(place, depth):
    deep = "[" * depth + "]" * depth
    tensor = {key: json.dumps(value) for key, value in PIXELS.items()}
    fields = {"inputs": "[TENSOR]"} | ({} if place in tensor else {place: deep})
    tensor |= {place: deep} if place in tensor else {}
    text = ",".join(f'"{key}":{value}' for key, value in fields.items())
    one = ",".join(f'"{key}":{value}' for key, value in tensor.items())
    body = ("{" + text + "}").replace("TENSOR", "{" + one + "}").encode()
    with pytest.raises(BadTensorError) as refused:
        uint8_array(parse_request(body, None).inputs[0])
    assert len(refused.value.message) < 300


def with_output(parameters: Any) -> dict[str, Any]:
    return {"inputs": [PIXELS], "outputs": [{"name": "probabilities", "parameters": parameters}]}


@cases(
    "fields, says",
    ([], "the request is"),
    ("text", "the request is"),
    ({}, "inputs is None"),
    ({"inputs": {}}, "inputs is"),
    ({"inputs": [3]}, "an input is 3"),
    ({"inputs": [PIXELS] * 17}, "17 inputs, the limit is 16"),
    ({"inputs": [PIXELS], "outputs": 3}, "outputs is 3"),
    ({"inputs": [PIXELS], "outputs": [3]}, "an output is 3"),
    ({"inputs": [PIXELS], "outputs": [{}]}, "an output's name is None"),
    ({"inputs": [PIXELS], "parameters": []}, "parameters is"),
    ({"inputs": [PIXELS], "id": 3}, "id is 3"),
    ({"inputs": [PIXELS], "id": "x" * 1025}, "up to 1024 characters"),
    ({"inputs": [PIXELS], "parameters": {"binary_data_output": 1}}, "true or false"),
    ({"inputs": [{**PIXELS, "parameters": {"binary_data_size": 2}}]}, "both data and binary"),
    ({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1]}]}, "neither data nor"),
    ({"inputs": [{**PIXELS, "parameters": IN_REGION}]}, "has data and a region"),
    ({"inputs": [{**NO_DATA, "parameters": TWICE}]}, "has data and a region"),
    (with_output(3), "parameters is 3"),
    (with_output({"classification": 0}), "classification is 0"),
    (with_output({"classification": -1}), "classification is -1"),
    (with_output({"classification": "3"}), "whole number"),
    (with_output({"classification": True}), "whole number"),
    (with_output({"binary_data": "yes"}), "true or false"),
    (with_output({"shared_memory_region": "r"}), "shared_memory_byte_size is None"),
    (with_output({"shared_memory_byte_size": 2}), "shared_memory_region is None"),
    (with_output({"shared_memory_offset": 2}), "shared_memory_region is None"),
    (with_output({**IN_REGION, "shared_memory_region": ""}), "shared_memory_region is ''"),
    (with_output({**IN_REGION, "shared_memory_region": ["r"]}), "shared_memory_region is"),
    (with_output({**IN_REGION, "shared_memory_byte_size": 0}), "give a size from 1"),
    (with_output({**IN_REGION, "shared_memory_byte_size": -1}), "give a size from 1"),
    (with_output({**IN_REGION, "shared_memory_byte_size": "2"}), "whole number"),
    (with_output({**IN_REGION, "shared_memory_byte_size": True}), "whole number"),
    (with_output({**IN_REGION, "shared_memory_offset": -1}), "an offset from 0"),
    (with_output({**IN_REGION, "shared_memory_offset": 0.5}), "whole number"),
)
def test_json_that_is_no_request(fields, says):
    with pytest.raises(BadTensorError, match=says):
        parsed(with_header(fields))


@pytest.mark.parametrize("size", [-1, 4, 2**31, 2**64])
def test_a_size_beyond_what_is_left(size):
    tensor: dict[str, Any] = {"name": "x", "datatype": "BYTES", "shape": [1]}
    tensor |= {"parameters": {"binary_data_size": size}}
    with pytest.raises(BadTensorError, match=r"binary_data_size is .* 3 bytes are left|whole"):
        parsed(with_header({"inputs": [tensor]}, b"abc"))


def test_what_no_input_takes_or_is_too_much_json_is_refused():
    with pytest.raises(BadTensorError, match="3 bytes are left over after the inputs"):
        parsed(with_header({"inputs": [PIXELS]}, b"abc"))
    with pytest.raises(BodyTooLargeError, match=f"the limit is {MAX_JSON_BYTES}"):
        parse_request(b"[" * (MAX_JSON_BYTES + 1), None)


@cases(
    "parameters, timeout_s, priority, top_k",
    ({}, None, None, None),
    ({"timeout": 2_500_000, "priority": 1, "top_k": 3}, 2.5, "u=0", 3),
    ({"timeout": 0, "priority": 0}, None, None, None),
    ({"priority": 5}, None, "u=4", None),
    ({"priority": 2**40}, None, "u=7", None),
)
def test_parameters_of_the_request(parameters, timeout_s, priority, top_k):
    request = InferRequest((), parameters=parameters)
    assert (request.timeout_s, request.priority, request.top_k) == (timeout_s, priority, top_k)


@cases(
    "name, value",
    *(("timeout", -1), ("timeout", 0.5), ("timeout", "1"), ("priority", -1), ("priority", [])),
    *(("threshold", "x"), ("threshold", True), ("plan", 1), ("plan", [])),
)
def test_parameters_that_make_no_sense(name, value):
    request = InferRequest((), parameters={name: value})
    with pytest.raises(BadTensorError, match=name):
        _ = request.timeout_s, request.priority, request.threshold, request.plan


@cases(
    "asked, expected",
    (
        {"instances": [{"b64": ""}] * 2},
        {
            "predictions": [
                {"probabilities": ROWS[0], "label": ["a", "b"]},
                {"probabilities": ROWS[1], "label": ["b"]},
            ]
        },
    ),
    (
        {"inputs": {"image": [{"b64": ""}] * 2}},
        {"outputs": {"probabilities": ROWS, "label": [["a", "b"], ["b", ""]]}},
    ),
)
def test_rows_lose_what_fills_them_and_columns_are_arrays(asked: Any, expected: Any) -> None:
    """As several labels of an image: empty ones fill the shorter row."""
    prediction = Prediction()
    (tensor,) = prediction.parse(json.dumps(asked).encode()).inputs
    assert tensor.shape == (2,)
    labels = OutputTensor("label", (2, 2), [b"a", b"b", b"b", b""])
    rows = OutputTensor("probabilities", (2, 2), np.array(ROWS, np.float32))
    answer = InferAnswer("m", "1", "", (rows, labels), {"sure": False})
    body, num_json = prediction.render(answer)
    assert (json.loads(body), num_json) == (expected | {"parameters": {"sure": False}}, None)
