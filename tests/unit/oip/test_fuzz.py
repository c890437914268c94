"""Whatever a body holds: a request, or one of the two errors that a client is told."""

import json
import struct
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import BadTensorError, BodyTooLargeError
from app.oip.bodies import parse_request
from app.oip.tensors import bytes_elements, checked_tensor, packed_elements, uint8_array
from tests.support.open_inference import with_header

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=SLOW)
NUMBERS = st.integers(-3, 9) | st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, 2**70, -(2**63)])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
NAMES = st.sampled_from(["image", "pixels", ""]) | JSON
DATATYPES = st.sampled_from(["UINT8", "BYTES", "FP32"]) | JSON
SHAPES = st.lists(NUMBERS, max_size=5) | JSON
PLACES: dict[str, Any] = {"shared_memory_region": st.just("r") | JSON}
for size in ("binary_data_size", "shared_memory_byte_size", "shared_memory_offset"):
    PLACES[size] = NUMBERS | JSON
PARAMETERS = st.fixed_dictionaries({}, optional=PLACES) | JSON
TENSORS = st.fixed_dictionaries(
    {"name": NAMES, "datatype": DATATYPES, "shape": SHAPES},
    optional={"data": JSON, "parameters": PARAMETERS},
)
ASKED = st.sampled_from(["timeout", "priority", "top_k", "binary_data_output"])
OUTPUTS = st.fixed_dictionaries({"name": NAMES}, optional={"parameters": PARAMETERS})
MORE = {"id": JSON, "parameters": st.dictionaries(ASKED, JSON)}
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS | JSON, max_size=3) | JSON},
    optional=MORE | {"outputs": st.lists(OUTPUTS | JSON, max_size=3)},
)


def read(body: bytes, header_length: str | None) -> None:
    """Parse a body and read all that is in it."""
    refused = None
    try:
        request = parse_request(body, header_length)
        _ = request.top_k, request.timeout_s, request.priority, request.wants_binary
        described: list[Any] = [*request.inputs, *request.outputs]
        for part in (one.region for one in described if one.region):
            assert part.region
            assert part.byte_size > 0 <= part.offset
        for tensor in (one for one in request.inputs if one.region is None):
            if tensor.datatype == "UINT8":
                assert uint8_array(tensor).shape == tensor.shape
            else:
                assert len(bytes_elements(tensor)) == tensor.num_elements
    except (BadTensorError, BodyTooLargeError) as error:
        refused = error
    assert refused is None or 0 < len(refused.message) < 600


@EXAMPLES
@given(st.binary(max_size=60), st.none() | st.text(max_size=4) | st.integers(-1, 70).map(str))
def test_any_bytes_and_any_header(body: bytes, header_length: str | None):
    read(body, header_length)


@EXAMPLES
@given(REQUESTS, st.binary(max_size=40), st.integers(-2, 2))
def test_any_request_with_any_data(fields: dict[str, Any], raw: bytes, shift: int):
    body, headers = with_header(fields, raw)
    read(body, str(int(next(iter(headers.values()))) + shift))


@EXAMPLES
@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_elements_are_read_as_written_and_never_past_the_end(values: list[bytes], data: Any):
    raw = packed_elements(values)
    assert bytes_elements(checked_tensor("image", "BYTES", [len(values)], raw=raw)) == values
    place = data.draw(st.integers(0, len(raw)))
    other = data.draw(st.sampled_from([raw[:place], raw[:place] + struct.pack("<I", 7) + raw]))
    try:
        found = bytes_elements(checked_tensor("image", "BYTES", [len(values)], raw=other))
    except BadTensorError:
        return
    assert packed_elements(found) == other


@EXAMPLES
@given(JSON, SHAPES)
def test_any_values_and_any_shape(values: Any, shape: Any):
    values = json.loads(json.dumps(values))
    try:
        array = uint8_array(checked_tensor("pixels", "UINT8", shape, values=values))
    except BadTensorError:
        return
    assert array.shape == tuple(shape)
