"""``tandem classify --offline`` on a cluster of two nodes on this machine, and without one.

    python tests/load/offline_cluster.py IMAGES [--json FILE]

Each node has half of the cores, so both commands have the same. Answers are compared. The rate of
the cluster has the start of its processes in it, which the other's has not.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from ray.cluster_utils import Cluster
from result_file import write_result

TANDEM = Path(sys.executable).with_name("tandem")
SAID = re.compile(r"(\d+) images classified.*\(([\d.]+) images/s\)", re.S)
NODES = 2


def main(
    images: Path,
    model_set: str = "imagenette",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Classify all images on the cluster, and in one process; compare."""
    node = {"num_cpus": max(1, (os.cpu_count() or 1) // NODES)}
    alone, alone_per_s = _classified(images, model_set)
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**node)
        rows, per_s = _classified(images, model_set, "--address", cluster.address)
    finally:
        cluster.shutdown()
    result = {
        "model_set": model_set,
        "nodes": NODES,
        "num_images": len(alone),
        "num_same": sum(rows.get(file) == row for file, row in alone.items()),
        "num_errors": sum("error" in row for row in rows.values()),
        "cluster_per_s": per_s,
        "alone_per_s": alone_per_s,
    }
    write_result({**describe(), **result}, json_file)


def _classified(images: Path, model_set: str, *options: str) -> tuple[dict[str, Any], float]:
    """Return the rows by file, and images per second."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.jsonl"
        command = [TANDEM, "classify", "--offline", "--model-set", model_set, "--out", out]
        done = subprocess.run([*command, *options, images], capture_output=True, text=True)
        said = SAID.search(done.stderr)
        if said is None:
            raise SystemExit(done.stderr)
        rows = map(json.loads, out.read_text("utf-8").splitlines())
        return {row["file"]: row for row in rows}, float(said[2])


if __name__ == "__main__":
    typer.run(main)
