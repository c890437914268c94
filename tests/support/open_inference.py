"""Requests of the Open Inference Protocol as clients write them, and a service for them."""

import json
import struct
from typing import Any

import httpx
import numpy as np

from app.http.api import create_api
from app.oip.inference import Inference
from app.settings import Settings
from app.stages.combiner import Combiner
from models.ensemble import tempered
from models.model_set import load_model_set
from tests.support.fakes import FakeDecoder, FakeMember, service_of

Sent = tuple[bytes, dict[str, str]]  # a body, and its headers
HEADER_LENGTH = "inference-header-content-length"
MODEL = "/v2/models/imagenette"
IMAGE = b"good image"
SIZE = 128  # the bundled set's input size
FIRST = [0.05, 0.6, 0.05, 0.1, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]
SECOND = [0.05, 0.2, 0.05, 0.3, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0]
BUNDLED = load_model_set("imagenette")
MEAN = tempered(
    np.array([FIRST, SECOND], np.float32).mean(0)[np.newaxis], BUNDLED.manifest.temperature
)[0]
VERSION = BUNDLED.fingerprint()
LABELS = BUNDLED.labels


class Graph:
    """The real service of the bundled set, whose members answer ``FIRST`` and ``SECOND``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**({"max_files": 4, "max_body_bytes": 500_000} | settings))
        self.decoder = FakeDecoder()
        self.members = {"resnet50": FakeMember(FIRST), "densenet169": FakeMember(SECOND)}
        combiner = Combiner(self.settings)
        self.service = service_of(self.settings, self.decoder, self.members, combiner)


def elements(*values: bytes) -> bytes:
    """Return BYTES elements in their binary form."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def binary_request(raw, *, name="image", datatype="BYTES", shape=None, **fields):
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


def client_of(graph, regions=None, address="127.0.0.1"):
    """Return a client of the HTTP interface at ``address``; with ``regions`` of shared memory."""
    api = create_api(graph.service, Inference(graph.service, regions))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False, client=(address, 9))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def infer(client: httpx.AsyncClient, sent: Sent, path: str = MODEL, **headers: str) -> Any:
    body, own = sent
    return await client.post(f"{path}/infer", content=body, headers={**own, **headers})


def images(*files: bytes, **fields: Any) -> Sent:
    return binary_request(elements(*files), shape=[len(files)], **fields)


def pixels(array: np.ndarray, **fields: Any) -> Sent:
    return binary_request(
        array.tobytes(), name="pixels", datatype="UINT8", shape=list(array.shape), **fields
    )


def drawn(count: int = 1) -> np.ndarray:
    return np.full((count, SIZE, SIZE, 3), 7, np.uint8)


def asked(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": parameters} for name in names]


def error_of(answer: httpx.Response, status: int) -> str:
    """Return the message of an error in the protocol's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return body["error"]
