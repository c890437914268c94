"""The ways by which a request gets to the service, each as its users' libraries write it.

What a caller has to do for each request is done for each request: a tensor is put into bytes
anew, JSON is written anew. Files are sent as they are. Every way asks for the same: the
probabilities of each image, or over /v1 its first class.
"""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from protocol_study.payloads import Payloads, Pixels

HEADER_LENGTH = "Inference-Header-Content-Length"
OUTPUT = "probabilities"


class SendError(Exception):
    """A request that was not answered with success: its kind, such as ``http_413``, and why."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(why or kind)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """A service, and the set that it serves."""

    url: str  # http://HOST:PORT
    grpc: str  # HOST:PORT
    model: str


@dataclass(frozen=True)
class Way:
    """How requests are sent: the row of a table."""

    protocol: str  # a key of PROTOCOLS
    payload: str  # jpeg or uint8
    batch: int = 1  # images in a request
    is_kept: bool = True  # the connection; else one for each request

    @property
    def name(self) -> str:
        return f"{self.protocol}, {self.payload}"


class Sender(Protocol):
    """Sends the ``number``-th request and awaits its answer.

    Raises:
        SendError: it was refused, or did not come.

    """

    async def __call__(self, number: int) -> None: ...


Written = tuple[str, bytes, dict[str, str]]  # path, body, headers
Write = Callable[[int], Written]  # a request over HTTP by its number


def http_raw(payloads: Payloads, way: Way, address: Address) -> Write:
    """POST /v1/classify: the file is the body."""
    return lambda number: ("/v1/classify?top_k=1", payloads.files_of(number, 1)[0], {})


def http_form(payloads: Payloads, way: Way, address: Address) -> Write:
    """POST /v1/classify: a multipart form."""
    # Written here: aiohttp's own form costs the client more than the request.
    boundary = b"study-of-protocols"
    head = b'--%b\r\nContent-Disposition: form-data; name="files"; filename="%d"\r\n\r\n%b\r\n'
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}

    def write(number: int) -> Written:
        files = enumerate(payloads.files_of(number, way.batch))
        parts = [head % (boundary, place, file) for place, file in files]
        return "/v1/classify?top_k=1", b"".join([*parts, b"--%b--\r\n" % boundary]), headers

    return write


def oip_binary(payloads: Payloads, way: Way, address: Address) -> Write:
    """Open Inference Protocol over REST: tensors behind the JSON, both ways."""

    def write(number: int) -> Written:
        name, datatype, shape, raw = tensor_of(payloads, way, number)
        size = {"binary_data_size": len(raw)}
        one = {"name": name, "datatype": datatype, "shape": shape, "parameters": size}
        asked = {"name": OUTPUT, "parameters": {"binary_data": True}}
        head = orjson.dumps({"inputs": [one], "outputs": [asked]})
        headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        return infer_path(address), head + raw, headers

    return write


def oip_json(payloads: Payloads, way: Way, address: Address) -> Write:
    """Open Inference Protocol over REST: all in JSON. It has no way for files there."""

    def write(number: int) -> Written:
        pixels = payloads.pixels_of(number, way.batch)
        one: dict[str, Any] = {"name": "pixels", "datatype": "UINT8"}
        one["shape"] = list(pixels.shape)
        one["data"] = pixels.ravel().tolist()
        asked = {"name": OUTPUT, "parameters": {"binary_data": False}}
        return infer_path(address), orjson.dumps({"inputs": [one], "outputs": [asked]}), {}

    return write


def infer_path(address: Address) -> str:
    return f"/v2/models/{address.model}/infer"


def tensor_of(payloads: Payloads, way: Way, number: int) -> tuple[str, str, list[int], bytes]:
    """Return name, datatype, shape and bytes of a request's input."""
    if way.payload == "jpeg":
        files = payloads.files_of(number, way.batch)
        return "image", "BYTES", [len(files)], elements(files)
    pixels: Pixels = payloads.pixels_of(number, way.batch)
    return "pixels", "UINT8", list(pixels.shape), pixels.tobytes()


def elements(values: list[bytes]) -> bytes:
    """Return BYTES elements as the protocol has them: each behind its length in 4 bytes."""
    lengths = [struct.pack("<I", len(value)) for value in values]
    return b"".join(itertools.chain.from_iterable(zip(lengths, values, strict=True)))


def check_rows(raw: bytes, batch: int) -> None:
    """Raise SendError unless there is a float32 row for each image whose sum is one."""
    rows = np.frombuffer(raw, "<f4").reshape(batch, -1)
    if not np.allclose(rows.sum(1), 1, atol=1e-3):
        raise SendError("bad_answer", f"rows sum to {rows.sum(1)}")
