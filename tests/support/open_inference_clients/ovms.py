"""Classifies with OpenVINO Model Server's client, and prints what it was told; run as a program.

It runs in a virtual environment of its own (make test-all). Arguments: see triton.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ovmsclient

Told = dict[str, Any]


def told_by(outputs: dict[str, np.ndarray]) -> Told:
    labels = [one if isinstance(one, str) else one.decode() for one in outputs["label"].ravel()]
    return {"probabilities": outputs["probabilities"].tolist(), "label": labels}


def ask(client: Any, model: str, folder: Path) -> Told:
    photo, pixels = (folder / "photo.jpg").read_bytes(), np.load(folder / "pixels.npy")
    ways: dict[str, Any] = {"image": photo, "images": [photo, photo], "batch": pixels}
    told: Told = {}
    for way, value in ways.items():
        name = "pixels" if way == "batch" else "image"
        told[way] = told_by(client.predict({name: value}, model, timeout=60))
    told["version 1"] = told_by(client.predict({"image": photo}, model, 1, timeout=60))
    told["status"] = client.get_model_status(model)
    told["metadata"] = client.get_model_metadata(model)
    for error, asked in (("no model", ("nothing", 0)), ("no version", (model, 7))):
        try:
            client.get_model_status(*asked)
        except ovmsclient.ModelNotFoundError as refused:
            told[error] = str(refused)
    try:
        client.predict({"image": b"no image"}, model)
    except ovmsclient.InvalidInputError as refused:
        told["no image"] = str(refused)
    return told


def main(http: str, grpc: str, given: str) -> None:
    folder = Path(given)
    model = (folder / "model").read_text()
    clients = {"http": ovmsclient.make_http_client(http), "grpc": ovmsclient.make_grpc_client(grpc)}
    print(json.dumps({name: ask(client, model, folder) for name, client in clients.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
