"""Protobuf messages written byte by byte: no exporter of ONNX is needed."""


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
