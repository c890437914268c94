"""An ONNX file written byte by byte: no exporter is needed."""

import struct

from tests.support.calibration.classifiers import MATRIX, SIDE


def proto(number: int, *values: int | bytes | str) -> bytes:
    """Encode a field of a protobuf message: numbers as varints, all else with its length."""
    out = b""
    for value in values:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def onnx_value(name: str, *sides: int | str) -> bytes:
    dims = b"".join(proto(1, proto(1 if isinstance(side, int) else 2, side)) for side in sides)
    return proto(1, name) + proto(2, proto(1, proto(1, 1) + proto(2, dims)))


def onnx_classifier(location: str = "") -> bytes:
    """GlobalAveragePool, Flatten, MatMul: [N,3,8,8] to logits [N,4], as an exporter writes it.

    With a ``location`` its weights are in that file.
    """

    def node(kind: str, *ends: str) -> bytes:
        return proto(1, *ends[:-1]) + proto(2, ends[-1]) + proto(4, kind)

    weights = proto(1, 3, 4) + proto(2, 1) + proto(8, "matrix")
    if location:
        weights += proto(13, proto(1, "location") + proto(2, location)) + proto(14, 1)
    else:
        weights += proto(9, struct.pack("<12f", *MATRIX.ravel()))
    nodes = (
        node("GlobalAveragePool", "pixels", "means"),
        node("Flatten", "means", "flat"),
        node("MatMul", "flat", "matrix", "logits"),
    )
    graph = proto(1, *nodes) + proto(2, "classifier") + proto(5, weights)
    graph += proto(11, onnx_value("pixels", "N", 3, SIDE, SIDE))
    graph += proto(12, onnx_value("logits", "N", 4))
    return proto(1, 8) + proto(7, graph) + proto(8, proto(2, 13))
