"""Requests of the Open Inference Protocol as its clients write them."""

import json
import struct
from typing import Any

Sent = tuple[bytes, dict[str, str]]  # a body, and its headers
HEADER_LENGTH = "inference-header-content-length"


def elements(*values: bytes) -> bytes:
    """Return BYTES elements in their binary form."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def binary_request(
    raw: bytes,
    *,
    name: str = "image",
    datatype: str = "BYTES",
    shape: list[int] | None = None,
    **fields: Any,
) -> Sent:
    """Return a request whose one input is binary; ``fields`` are further ones of the JSON."""
    tensor = {
        "name": name,
        "datatype": datatype,
        "shape": [1] if shape is None else shape,
        "parameters": {"binary_data_size": len(raw)},
    }
    return with_header({"inputs": [tensor], **fields}, raw)


def with_header(fields: dict[str, Any], raw: bytes = b"") -> Sent:
    """Return JSON with binary data after it, and the header that says where."""
    text = json.dumps(fields).encode()
    return text + raw, {HEADER_LENGTH: str(len(text))}


def outputs_of(answer: Any) -> dict[str, Any]:
    """Return the outputs of an answer over HTTP by name: lists, or bytes where it was binary."""
    num_json = int(answer.headers.get(HEADER_LENGTH, len(answer.content)))
    rest = answer.content[num_json:]
    found: dict[str, Any] = {}
    for output in json.loads(answer.content[:num_json])["outputs"]:
        if "data" in output:
            found[output["name"]] = output["data"]
            continue
        size = output["parameters"]["binary_data_size"]
        found[output["name"]], rest = rest[:size], rest[size:]
    assert rest == b""
    return found
