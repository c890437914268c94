"""Classifies photos with Triton's client, over the Open Inference Protocol.

    pip install 'tritonclient[http]'
    python examples/triton_client.py photo.jpg other.jpg --url 127.0.0.1:8000

The model is named like the served set. A network of the set alone is SET.MEMBER.
"""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.http as triton


def main() -> None:
    """Print each photo's label, all from one request."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("photos", nargs="+", type=Path)
    arguments.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT, without http://")
    arguments.add_argument("--model", default="imagenette")
    options = arguments.parse_args()

    files = np.array([photo.read_bytes() for photo in options.photos], np.object_)  # (N,)
    image = triton.InferInput("image", list(files.shape), "BYTES")
    image.set_data_from_numpy(files)
    outputs = [triton.InferRequestedOutput(name) for name in ("label", "probabilities")]

    client = triton.InferenceServerClient(options.url)
    answer = client.infer(options.model, [image], outputs=outputs)
    client.close()
    labels = answer.as_numpy("label")  # (N,) bytes
    probabilities = answer.as_numpy("probabilities")  # (N, C) float32
    for photo, label, row in zip(options.photos, labels, probabilities, strict=True):
        print(f"{photo}: {label.decode()} {row.max():.3f}")


if __name__ == "__main__":
    main()
