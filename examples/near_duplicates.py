"""Finds near-duplicates in a folder: the same photograph resized, cut or saved again.

    pip install ./client
    python examples/near_duplicates.py photos --member resnet50 --url http://127.0.0.1:8000

A member's pooled features (``embedding=MEMBER``) are compared by the cosine of their angle, after
the mean of all photographs is taken off. GET /v1/models lists the members.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from tandem_client import Client


def main() -> int:
    """Print the pairs that are alike, the likest first; return 1 if a file had no answer."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--member", default="resnet50")
    arguments.add_argument("--at-least", type=float, default=0.9, help="cosine, up to 1")
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    options = arguments.parse_args()
    files = sorted(path for path in options.folder.rglob("*") if path.is_file())
    names, vectors, status = [], [], 0
    with Client(options.url) as client:
        for result in client.classify_many(files, embedding=options.member, top_k=1):
            if result.answer is None:
                print(result.path, result.error, file=sys.stderr)
                status = 1
            else:
                names.append(result.path)
                vectors.append(result.answer.embedding)
    if len(names) < 2:
        print(f"{len(names)} photographs: nothing to compare", file=sys.stderr)
        return status
    rows = np.array(vectors, np.float32)
    rows -= rows.mean(axis=0)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    alike = np.triu(rows @ rows.T, k=1)
    for first, second in sorted(np.argwhere(alike >= options.at_least), key=lambda p: -alike[*p]):
        print(f"{alike[first, second]:.3f}  {names[first]}  {names[second]}")
    return status


if __name__ == "__main__":
    sys.exit(main())
