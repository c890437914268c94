"""What a message costs before it is parsed: the number of its fields is limited."""

import pytest

from app.errors import BadParameterError
from app.grpc.call import MAX_FIELDS, parsed
from app.grpc.open_inference_pb2 import ModelInferRequest
from app.grpc.tandem_pb2 import ClassifyRequest

INPUTS, IMAGES, CONTENTS, OF_BYTES = b"\x2a", b"\x0a", b"\x2a", b"\x42"


def of_length(tag: bytes, content: bytes) -> bytes:
    length, digits = len(content), bytearray()
    while length > 0x7F:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    return tag + bytes([*digits, length]) + content


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ModelInferRequest, INPUTS + b"\0"),
        (ClassifyRequest, IMAGES + b"\0"),
        (ClassifyRequest, b"\x58\1"),  # an unknown number
    ],
)
def test_fields_are_counted_before_they_take_memory(kind, message):
    parsed(message * 1000, kind)
    with pytest.raises(BadParameterError, match=f"over {MAX_FIELDS} fields, which is the limit"):
        parsed(message * (MAX_FIELDS + 1), kind)


def test_those_of_messages_in_it_count_too():
    tensor = of_length(CONTENTS, of_length(OF_BYTES, b"") * (MAX_FIELDS // 2))
    parsed(of_length(INPUTS, tensor), ModelInferRequest)
    with pytest.raises(BadParameterError, match="fields, which is the limit"):
        parsed(of_length(INPUTS, tensor) * 3, ModelInferRequest)


def test_values_that_are_packed_are_one_field():
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[2, 70_000])
    tensor.contents.fp32_contents.extend([0.5] * 140_000)
    tensor.parameters["p"].int64_param = 1
    message = ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b"x" * 10**6])
    assert parsed(message.SerializeToString(), ModelInferRequest) == message


@pytest.mark.parametrize("cut", [b"\x2a", b"\x2a\xff", b"\x2a\x05ab", b"\x80", b"\xff" * 20])
def test_a_message_that_is_cut_does_not_parse(cut):
    with pytest.raises(BadParameterError, match=r"are no inference\.ModelInferRequest"):
        parsed(cut, ModelInferRequest)
