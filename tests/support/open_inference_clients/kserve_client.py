"""Classifies with KServe's inference clients, and prints what they were told; run as a program.

Its package wants other versions of protobuf and psutil than the service has: it runs in a virtual
environment of its own (make test-all), and nothing of the project is imported here. Arguments: see
triton.py.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

Told = dict[str, Any]


def requests_of(model: str, folder: Path, *, is_http: bool) -> dict[str, InferRequest]:
    photo, pixels = (folder / "photo.jpg").read_bytes(), np.load(folder / "pixels.npy")
    typed = InferInput("pixels", [1, *pixels.shape[1:]], "UINT8", pixels[:1].ravel().tolist())
    image = InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([photo], np.object_), binary_data=True)
    raw = InferInput("pixels", list(pixels.shape), "UINT8")
    raw.set_data_from_numpy(pixels, binary_data=True)
    ways = {"image": image, "batch": raw, "pixels in JSON" if is_http else "typed pixels": typed}
    return {
        name: InferRequest(model, [one], request_id="mine", parameters={"priority": 1})
        for name, one in ways.items()
    }


def told_by(answer: Any) -> Told:
    rows, labels = (one.as_numpy() for one in answer.outputs)
    texts = [one if isinstance(one, str) else one.decode() for one in labels.ravel()]
    return {"probabilities": rows.tolist(), "label": texts}


async def over_http(url: str, model: str, folder: Path) -> Told:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, model)
    requests = requests_of(model, folder, is_http=True)
    told = {
        way: told_by(await client.infer(url, one, model_name=model))
        for way, one in requests.items()
    }
    await client.close()
    return told


async def over_v1(url: str, model: str, folder: Path) -> Told:
    """Return what the V1 protocol told, where images go in base64."""
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await client.is_server_live(url)
    assert await client.is_model_ready(url, model)
    file = {"b64": base64.b64encode((folder / "photo.jpg").read_bytes()).decode()}
    told = {}
    for way, instance in {"image": file, "named image": {"image": file}}.items():
        answer = await client.infer(url, {"instances": [instance]}, model_name=model)
        rows = answer["predictions"]
        told[way] = {name: [row[name] for row in rows] for name in ("probabilities", "label")}
    await client.close()
    return told


async def over_grpc(address: str, model: str, folder: Path) -> Told:
    client = InferenceGRPCClient(address)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready(model)
    requests = requests_of(model, folder, is_http=False)
    told = {way: told_by(await client.infer(one)) for way, one in requests.items()}
    await client.close()
    return told


async def main(http: str, grpc: str, given: str) -> None:
    folder = Path(given)
    model = (folder / "model").read_text()
    told = {
        "http": await over_http(f"http://{http}", model, folder),
        "v1": await over_v1(f"http://{http}", model, folder),
        "grpc": await over_grpc(grpc, model, folder),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
