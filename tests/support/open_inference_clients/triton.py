"""Classifies with Triton's own clients, and prints what they were told; run as a program.

Its generated protobuf code has the names that ours has, and one process may have them once: nothing
of the project is imported here. Arguments: the hosts and ports of HTTP and gRPC, and a folder with
photo.jpg, pixels.npy (N, H, W, 3) and the set's name in a file ``model``.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio

NAMES = ("probabilities", "label")
Told = dict[str, Any]


def inputs_of(client: Any, values: np.ndarray, **options: bool) -> list[Any]:
    """Return the one input of a request: pixels, or encoded images."""
    is_pixels = values.dtype == np.uint8
    name, datatype = ("pixels", "UINT8") if is_pixels else ("image", "BYTES")
    one = client.InferInput(name, list(values.shape), datatype)
    one.set_data_from_numpy(values, **options)
    return [one]


def told_by(result: Any) -> Told:
    rows, labels = (result.as_numpy(name) for name in NAMES)
    return {"probabilities": rows.tolist(), "label": texts_of(labels)}


def texts_of(elements: np.ndarray) -> list[str]:
    """Return BYTES elements, which are text already if they came as JSON."""
    return [one if isinstance(one, str) else one.decode() for one in elements.ravel()]


def requests_of(module: Any, folder: Path) -> dict[str, Told]:
    """Return the arguments of ``infer`` for every way of asking that a client has."""
    photo = np.array([(folder / "photo.jpg").read_bytes()], np.object_)
    pixels = np.load(folder / "pixels.npy")
    is_http = module in (over_http, over_http_aio)

    def asked(**options: bool) -> list[Any]:
        return [module.InferRequestedOutput(name, **options) for name in NAMES]

    ways: dict[str, Told] = {
        "image": {"inputs": inputs_of(module, photo)},
        "image of two dimensions": {"inputs": inputs_of(module, photo[None])},
        "pixels": {"inputs": inputs_of(module, pixels[:1]), "outputs": asked()},
        "batch": {"inputs": inputs_of(module, pixels), "outputs": asked(), "priority": 1},
    }
    if is_http:
        as_json = inputs_of(module, pixels[:1], binary_data=False)
        ways["pixels in JSON"] = {"inputs": as_json, "outputs": asked(binary_data=False)}
        ways["binary in, JSON out"] = {
            "inputs": inputs_of(module, photo),
            "outputs": asked(binary_data=False),
        }
        for coding in ("gzip", "deflate"):
            ways[coding] = {
                "inputs": inputs_of(module, pixels[:1]),
                "request_compression_algorithm": coding,
            }
    else:
        ways["gzip"] = {"inputs": inputs_of(module, pixels[:1]), "compression_algorithm": "gzip"}
    for way in ways.values():
        way.update(request_id="mine", timeout=5_000_000)
    return ways


def classes_of(module: Any, folder: Path) -> Told:
    """Return the arguments of ``infer`` for classification strings."""
    photo = np.array([(folder / "photo.jpg").read_bytes()], np.object_)
    outputs = [module.InferRequestedOutput("probabilities", class_count=3)]
    return {"inputs": inputs_of(module, photo), "outputs": outputs}


def strings_of(result: Any) -> list[str]:
    return texts_of(result.as_numpy("probabilities"))


def ask(module: Any, address: str, model: str, folder: Path) -> Told:
    client = module.InferenceServerClient(address)
    ways = requests_of(module, folder)
    told: Told = {
        name: told_by(client.infer(model, **arguments)) for name, arguments in ways.items()
    }
    told["classes"] = strings_of(client.infer(model, **classes_of(module, folder)))
    told["member"] = told_by(client.infer(f"{model}.resnet50", **ways["image"], model_version="1"))
    try:
        client.infer(model, **{"inputs": inputs_of(module, np.array([b"no image"], np.object_))})
    except module.InferenceServerException as error:
        told["error"] = [error.status(), error.message()]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model, "1")
    assert module is over_grpc or not client.is_model_ready("nothing")  # NOT_FOUND is raised
    options = {} if module is over_http else {"as_json": True}
    told["server"] = client.get_server_metadata(**options)
    told["metadata"] = client.get_model_metadata(model, **options)
    told["config"] = client.get_model_config(model, "1", **options)
    told["index"] = client.get_model_repository_index(**options)
    told["statistics"] = client.get_inference_statistics(model, **options)
    client.close()
    return told


async def ask_async(module: Any, address: str, model: str, folder: Path) -> Told:
    """Ask with a client of asyncio, every way at the same time."""
    async with module.InferenceServerClient(address) as client:
        ways = requests_of(module, folder)
        answers = await asyncio.gather(
            *(client.infer(model, **arguments) for arguments in ways.values())
        )
        told: Told = dict(zip(ways, map(told_by, answers), strict=True))
        told["classes"] = strings_of(await client.infer(model, **classes_of(module, folder)))
        assert await client.is_server_ready()
        assert await client.is_model_ready(model)
        return told


def main(http: str, grpc: str, given: str) -> None:
    folder = Path(given)
    model = (folder / "model").read_text()
    told = {
        "http": ask(over_http, http, model, folder),
        "grpc": ask(over_grpc, grpc, model, folder),
        "http.aio": asyncio.run(ask_async(over_http_aio, http, model, folder)),
        "grpc.aio": asyncio.run(ask_async(over_grpc_aio, grpc, model, folder)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
