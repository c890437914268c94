"""Classifies with Triton's clients and their shared memory module; run as a program.

Arguments and output as of triton.py, which says why nothing of the project is imported here. The
regions have names of this process, and are gone when it ends.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

NUM_CLASSES = 10
ROW_BYTES = 4 * NUM_CLASSES
LABEL_BYTES = 64  # enough for every label and its length
OUT_BYTES = 8 + 3 * (ROW_BYTES + LABEL_BYTES)
Told = dict[str, Any]


@contextmanager
def region(client: Any, name: str, byte_size: int, offset: int = 0) -> Iterator[Any]:
    """Make a region and register it while the block runs, all of it from ``offset`` on."""
    key = f"/tandem-test-{os.getpid()}-{name}"
    handle = shm.create_shared_memory_region(name, key, byte_size, create_only=True)
    try:
        client.register_system_shared_memory(name, key, byte_size - offset, offset)
        yield handle
    finally:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)


def classified(module: Any, client: Any, model: str, values: np.ndarray) -> Told:
    """Send an array by shared memory, and take the answer from there."""
    is_pixels = values.dtype == np.uint8
    name, datatype = ("pixels", "UINT8") if is_pixels else ("image", "BYTES")
    sent = values if is_pixels else serialize_byte_tensor(values)
    num_bytes, count = sent.nbytes if is_pixels else len(sent.item()), len(values)
    rows_at, labels_at = 8, 8 + count * ROW_BYTES
    with region(client, "in", num_bytes + 5, 5) as source, region(client, "out", OUT_BYTES) as out:
        shm.set_shared_memory_region(source, [sent], offset=5)
        one = module.InferInput(name, list(values.shape), datatype)
        one.set_shared_memory("in", num_bytes)
        outputs = [module.InferRequestedOutput(name) for name in ("probabilities", "label")]
        outputs[0].set_shared_memory("out", count * ROW_BYTES, rows_at)
        outputs[1].set_shared_memory("out", count * LABEL_BYTES, labels_at)
        answer = client.infer(model, [one], outputs=outputs)
        shapes = [shape_of(answer.get_output(name)) for name in ("probabilities", "label")]
        rows = shm.get_contents_as_numpy(out, np.float32, shapes[0], rows_at)
        labels = shm.get_contents_as_numpy(out, np.object_, shapes[1], labels_at)
        told = {"probabilities": rows.tolist(), "label": [one.decode() for one in labels.ravel()]}
        del rows  # a view of the region, which could not be closed
        return told


def shape_of(output: Any) -> list[int]:
    return list(output["shape"] if isinstance(output, dict) else output.shape)


def half(module: Any, client: Any, model: str, photo: np.ndarray) -> Told:
    """Send an image as others do and take one output from a region, the other from the answer."""
    with region(client, "out", ROW_BYTES) as out:
        one = module.InferInput("image", [1], "BYTES")
        one.set_data_from_numpy(photo)
        outputs = [module.InferRequestedOutput(name) for name in ("probabilities", "label")]
        outputs[0].set_shared_memory("out", ROW_BYTES)
        answer = client.infer(model, [one], outputs=outputs)
        rows = shm.get_contents_as_numpy(out, np.float32, [1, NUM_CLASSES]).tolist()
    label = answer.as_numpy("label")[0]
    label = label if isinstance(label, str) else label.decode()
    return {"probabilities": rows, "label": [label]}


def gone(module: Any, client: Any, model: str, photo: np.ndarray) -> str:
    """Return what is said of a region whose file was removed."""
    with region(client, "in", 1000) as source:
        source._mpsm_handle.unlink()
        source._mpsm_handle.unlink = lambda: None
        one = module.InferInput("image", [1], "BYTES")
        one.set_shared_memory("in", 1000)
        return refused(lambda: client.infer(model, [one]))


def refused(call: Any) -> str:
    try:
        call()
    except InferenceServerException as error:
        return str(error)
    return ""


def ask(module: Any, address: str, folder: Path) -> Told:
    client = module.InferenceServerClient(address)
    model = (folder / "model").read_text()
    photo = np.array([(folder / "photo.jpg").read_bytes()], np.object_)
    pixels = np.load(folder / "pixels.npy")
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    arrays = {"image": photo, "pixels": pixels[:1], "batch": pixels}
    told: Told = {way: classified(module, client, model, one) for way, one in arrays.items()}
    told["half"] = half(module, client, model, photo)
    told["gone"] = gone(module, client, model, photo)
    told["unknown"] = refused(lambda: client.get_system_shared_memory_status("nothing"))
    told["cuda"] = refused(lambda: client.register_cuda_shared_memory("c", b"AA==", 0, 64))
    options = {} if module is over_http else {"as_json": True}
    with region(client, "mine", 100, 10):
        told["status"] = client.get_system_shared_memory_status("mine", **options)
    told["left"] = client.get_system_shared_memory_status(**options)
    told["extensions"] = client.get_server_metadata(**options)["extensions"]
    client.close()
    return told


def main(http: str, grpc: str, given: str) -> None:
    folder = Path(given)
    print(json.dumps({"http": ask(over_http, http, folder), "grpc": ask(over_grpc, grpc, folder)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
