"""Classifies with the package open-inference-grpc, and prints what it was told; run as a program.

Nothing of the project is imported here: see triton.py, which has the same arguments but the first.
"""

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from open_inference.grpc.protocol import (
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelReadyRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
)
from open_inference.grpc.service import GRPCInferenceServiceStub

Input = ModelInferRequest.InferInputTensor


def requests_of(model: str, photo: bytes, pixels: np.ndarray) -> dict[str, ModelInferRequest]:
    shape = list(pixels.shape)
    typed = InferTensorContents(bytes_contents=[photo])
    numbers = InferTensorContents(uint_contents=pixels.ravel().tolist())
    inputs = {
        "typed image": Input(name="image", datatype="BYTES", shape=[1], contents=typed),
        "typed pixels": Input(name="pixels", datatype="UINT8", shape=shape, contents=numbers),
        "raw pixels": Input(name="pixels", datatype="UINT8", shape=shape),
    }
    asked = {
        way: ModelInferRequest(model_name=model, id="mine", inputs=[one])
        for way, one in inputs.items()
    }
    asked["raw pixels"].raw_input_contents.append(pixels.tobytes())
    return asked


def told_by(answer: ModelInferResponse) -> dict[str, Any]:
    rows, labels = answer.outputs
    assert [rows.name, labels.name, answer.id] == ["probabilities", "label", "mine"]
    if answer.raw_output_contents:
        values = np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()
        return {"probabilities": values, "label": answer.raw_output_contents[1][4:].decode()}
    return {
        "probabilities": list(rows.contents.fp32_contents),
        "label": labels.contents.bytes_contents[0].decode(),
    }


def main(address: str, given: str) -> None:
    folder = Path(given)
    model = (folder / "model").read_text()
    photo, pixels = (folder / "photo.jpg").read_bytes(), np.load(folder / "pixels.npy")[:1]
    with grpc.insecure_channel(address) as channel:
        client = GRPCInferenceServiceStub(channel)
        assert client.ServerLive(ServerLiveRequest()).live
        assert client.ServerReady(ServerReadyRequest()).ready
        assert client.ModelReady(ModelReadyRequest(name=model, version="1")).ready
        asked = requests_of(model, photo, pixels)
        told: dict[str, Any] = {w: told_by(client.ModelInfer(one)) for w, one in asked.items()}
        told["server"] = client.ServerMetadata(ServerMetadataRequest()).name
        metadata = client.ModelMetadata(ModelMetadataRequest(name=model))
        told["inputs"] = [one.name for one in metadata.inputs]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
