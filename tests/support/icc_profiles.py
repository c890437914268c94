"""ICC profiles of RGB spaces, as phones and cameras embed them (ICC.1:2010)."""

import struct
from collections.abc import Sequence

WHITE = (0.9642, 1.0, 0.8249)  # D50
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)  # a parametric curve of type 3
# Red, green and blue as XYZ, adapted to D50.
DISPLAY_P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407))
ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.7141))


def matrix_profile(
    colorants: Sequence[Sequence[float]], curve: Sequence[float] = SRGB_CURVE, name: str = "RGB"
) -> bytes:
    """Return a display profile of a matrix and a curve; a curve of one number is a gamma."""

    def fixed(*values: float) -> bytes:
        return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))

    shape = b"para" + struct.pack(">IHH", 0, 3 if len(curve) > 1 else 0, 0) + fixed(*curve)
    text = name.encode("utf-16-be")
    words = b"mluc" + struct.pack(">IIIHHII", 0, 1, 12, 0x656E, 0x5553, len(text), 28) + text
    bodies = {b"desc": words, b"cprt": words, b"wtpt": b"XYZ \0\0\0\0" + fixed(*WHITE)}
    for letter, own in zip("rgb", colorants, strict=True):
        bodies[f"{letter}XYZ".encode()] = b"XYZ \0\0\0\0" + fixed(*own)
        bodies[f"{letter}TRC".encode()] = shape
    start, table, data = 132 + 12 * len(bodies), struct.pack(">I", len(bodies)), b""
    for tag, body in bodies.items():
        table += tag + struct.pack(">II", start + len(data), len(body))
        data += body + b"\0" * (-len(body) % 4)
    header = struct.pack(
        ">I4s4s4s4s4s", start + len(data), b"lcms", b"\4\x30\0\0", b"mntr", b"RGB ", b"XYZ "
    )
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28) + fixed(*WHITE)
    return header.ljust(128, b"\0") + table + data
