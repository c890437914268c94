"""Tiny networks made in code: what :func:`tiny_model` computes, as ONNX and .pt2.

ONNX files are written byte by byte (no exporter, no onnx package); a .pt2 needs torch.
"""

import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from calibration.sets.transaction import write_manifest
from models.manifest import MemberRecord, Network, read_manifest
from models.record import SUFFIXES, FileRecord, RuntimeName
from tests.support.calibration.onnx_file import proto
from tests.support.tiny_networks import SIZE, record_golden, write_tiny_set

UINT8, FLOAT = 2, 1  # onnx.TensorProto.DataType
BATCH = "N"


def typed_value(name: str, kind: int, *sides: int | str) -> bytes:
    dims = b"".join(proto(1, proto(1 if isinstance(side, int) else 2, side)) for side in sides)
    return proto(1, name) + proto(2, proto(1, proto(1, kind) + proto(2, dims)))


def node(kind: str, *ends: str, attributes: bytes = b"") -> bytes:
    return proto(1, *ends[:-1]) + proto(2, ends[-1]) + proto(4, kind) + attributes


def integer(name: str, value: int) -> bytes:
    return proto(5, proto(1, name) + proto(3, value) + proto(20, 2))


def integers(name: str, *values: int) -> bytes:
    return proto(5, proto(1, name) + proto(8, *values) + proto(20, 7))


def tensor(name: str, sides: tuple[int, ...], values: list[float], external: str = "") -> bytes:
    facts = proto(1, *sides) + proto(2, FLOAT) + proto(8, name)
    if external:
        return facts + proto(13, proto(1, "location") + proto(2, external)) + proto(14, 1)
    return facts + proto(9, struct.pack(f"<{len(values)}f", *values))


def tiny_onnx(
    gain=4.0, batch=BATCH, *, size=SIZE, opset=17, external="", operator="Cast", num_outputs=1
):
    """u8 [N,size,size,3] -> softmax of ``gain`` x mean colour (0..1), as a folded ONNX graph."""
    nodes = (
        node(operator, "pixels", "floats", attributes=integer("to", FLOAT)),
        node("Transpose", "floats", "planes", attributes=integers("perm", 0, 3, 1, 2)),
        node("GlobalAveragePool", "planes", "means"),
        node("Flatten", "means", "flat"),
        node("Mul", "flat", "gain", "logits"),
        node("Softmax", "logits", "rows", attributes=integer("axis", 1)),
    )
    graph = proto(1, *nodes) + proto(2, "tiny")
    graph += proto(5, tensor("gain", (1, 3), [gain / 255] * 3, external))
    graph += proto(11, typed_value("pixels", UINT8, batch, size, size, 3))
    outputs = ("rows", "logits")[:num_outputs]
    graph += proto(12, *(typed_value(name, FLOAT, batch, 3) for name in outputs))
    return proto(1, 8) + proto(7, graph) + proto(8, proto(2, opset))


def float_onnx(gain: float = 4.0, batch: int | str = BATCH, *, external: str = "") -> bytes:
    """Build float [N,3,16,16] RGB -> logits [N,3], as an exporter writes it: for models add."""
    nodes = (
        node("GlobalAveragePool", "image", "means"),
        node("Flatten", "means", "flat"),
        node("Mul", "flat", "gain", "logits"),
    )
    graph = proto(1, *nodes) + proto(2, "classifier")
    graph += proto(5, tensor("gain", (1, 3), [gain] * 3, external))
    graph += proto(11, typed_value("image", FLOAT, batch, 3, SIZE, SIZE))
    graph += proto(12, typed_value("logits", FLOAT, batch, 3))
    return proto(1, 8) + proto(7, graph) + proto(8, proto(2, 17))


def write_tiny_pt2(path: Path, gain: float = 4.0, batch: int | None = None) -> Path:
    """Export what :func:`tiny_onnx` computes, as sets had it once; ``batch`` builds a size in."""
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.full((3,), gain / 255))

        def forward(self, pixels: Any) -> Any:
            means = pixels.float().mean((1, 2))
            return torch.softmax(means.reshape(pixels.shape[0], 3) * self.gain, 1)

    export_module(Tiny(), path, torch.zeros(batch or 2, SIZE, SIZE, 3, dtype=torch.uint8), batch)
    return path


def export_module(module: Any, path: Path, example: Any, batch: int | None = None) -> None:
    """Write a .pt2 as its users do: torch.export.save(torch.export.export(...))."""
    import torch

    shapes = None if batch else ({0: torch.export.Dim("batch", min=1, max=1024)},)
    torch.export.save(torch.export.export(module.eval(), (example,), dynamic_shapes=shapes), path)


def publish(content: object, folder: Path, name: str) -> Path:
    """Write a weights file as the publisher does: torch.save, the hash in the name."""
    import torch

    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)
    digest = sha256((folder / name).read_bytes()).hexdigest()
    return (folder / name).rename(folder / f"{name}-{digest[:8]}.pth")


def torch_rows(module: Any, pixels: np.ndarray) -> np.ndarray:
    """Return a network's probabilities of BGR pixels, normalised as torchvision does."""
    import torch

    from calibration.training.train import normalised

    with torch.inference_mode():
        return module(normalised(np.ascontiguousarray(pixels[..., ::-1]))).softmax(1).numpy()


def write_mixed_set(folder: Path, *, runtimes: tuple[RuntimeName, ...], gain: float = 8.0) -> Path:
    """Write a model set with golden answers whose members compute the same, each on a runtime.

    A member is called like its runtime. Their networks count as float, OpenVINO's as INT8 too.
    """
    write_tiny_set(folder, gains={"openvino": gain}, precision="FP16")
    manifest = read_manifest(folder)
    networks = {"openvino": manifest.member("openvino").network("FP16")}
    for runtime in runtimes:
        path = folder / f"{runtime}{SUFFIXES[runtime]}"
        if runtime == "onnxruntime":
            path.write_bytes(tiny_onnx(gain))
        if runtime != "openvino":
            networks[runtime] = Network(runtime=runtime, file=FileRecord.of(folder, path.name))
    made = {
        name: {"FP16": network} | ({"INT8": network} if name == "openvino" else {})
        for name, network in networks.items()
    }
    members = tuple(
        MemberRecord(name=name, source="made in code", networks=made[name]) for name in runtimes
    )
    write_manifest(folder, manifest.model_copy(update={"members": members}))
    record_golden(folder)
    return folder


def write_float_pt2(path: Path, gain: float = 4.0, batch: int | None = None) -> Path:
    """Export what :func:`float_onnx` computes, as its users would: for models add."""
    import torch

    class Means(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.full((3,), gain))

        def forward(self, image: Any) -> Any:
            return image.mean((2, 3)) * self.gain

    export_module(Means(), path, torch.zeros(batch or 2, 3, SIZE, SIZE), batch)
    return path
