"""Weights of a tiny EfficientNet-Lite, and files as PyTorch wrote them before zip archives."""

import struct
from collections.abc import Mapping

import numpy as np

STEM, HEAD = 4, 6
# Widths of the blocks; where one is that of the block before, the stage goes on.
WIDTHS = (3, 4, 4, 5, 6, 7, 8, 9)
CHOSEN = b"ccollections\nOrderedDict\n)R"


def lite_tensors(num_classes: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Return a state dict with every kind of layer that the network has."""
    generator, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()

    def convolution(name: str, norm: str, *shape: int) -> None:
        deviation = np.prod(shape[1:]) ** -0.5
        tensors[f"{name}.weight"] = generator.normal(0, 2 * deviation, shape).astype(np.float32)
        for part, low, high in (("weight", 0.5, 1.5), ("bias", -0.2, 0.8)):
            tensors[f"{norm}.{part}"] = generator.uniform(low, high, shape[0]).astype(np.float32)
        tensors[f"{norm}.running_mean"] = generator.normal(0, 0.2, shape[0]).astype(np.float32)
        tensors[f"{norm}.running_var"] = generator.uniform(0.5, 2, shape[0]).astype(np.float32)
        tensors[f"{norm}.num_batches_tracked"] = np.array(7, np.int64)

    convolution("_conv_stem", "_bn0", STEM, 3, 3, 3)
    before = STEM
    for place, width in enumerate(WIDTHS):
        name, inner, side = f"_blocks.{place}", before * 2 if place else before, 5 - 2 * (place % 2)
        if place:
            convolution(f"{name}._expand_conv", f"{name}._bn0", inner, before, 1, 1)
        convolution(f"{name}._depthwise_conv", f"{name}._bn1", inner, 1, side, side)
        convolution(f"{name}._project_conv", f"{name}._bn2", width, inner, 1, 1)
        before = width
    convolution("_conv_head", "_bn1", HEAD, before, 1, 1)
    tensors["_fc.weight"] = generator.normal(0, 2, (num_classes, HEAD)).astype(np.float32)
    tensors["_fc.bias"] = generator.normal(0, 0.1, num_classes).astype(np.float32)
    return tensors


def old_file(tensors: Mapping[str, np.ndarray], extra: bytes = b"") -> bytes:
    """Write the old format; ``extra`` are opcodes that run before the tensors are made."""
    magic = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    system = b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s."
    body = b"\x80\x02" + extra + CHOSEN + b"("
    for place, (name, values) in enumerate(tensors.items()):
        body += _text(name) + _tensor(str(place), values)
    keys = b"\x80\x02](" + b"".join(_text(str(place)) for place in range(len(tensors))) + b"e."
    storages = b"".join(struct.pack("<q", v.size) + v.tobytes() for v in tensors.values())
    return magic + b"\x80\x02M\xe9\x03." + system + body + b"u." + keys + storages


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _tensor(key: str, values: np.ndarray) -> bytes:
    storage = {"float32": b"FloatStorage", "int64": b"LongStorage"}[str(values.dtype)]
    persistent = b"(" + _text("storage") + b"ctorch\n" + storage + b"\n" + _text(key)
    persistent += _text("cpu") + _number(values.size) + b"NtQ"
    shape = b"(" + b"".join(map(_number, values.shape)) + b"t"
    strides = b"(" + b"".join(_number(s // values.itemsize) for s in values.strides) + b"t"
    view = persistent + _number(0) + shape + strides + b"\x89" + CHOSEN
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + view + b"tR"
