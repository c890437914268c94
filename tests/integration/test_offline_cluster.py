"""``tandem classify-offline --address``: the rows of a command alone, from a cluster's nodes.

In the fast tier: tests/unit/cli/test_cluster_rows.py has what needs no cluster.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pyarrow.fs
import pyarrow.parquet
import pytest
from ray.cluster_utils import Cluster

from calibration.answer_files import key_of
from tests.support.command_line import tandem
from tests.support.object_stores import local_s3
from tests.support.spoilt_golden import both_precisions, spoil_int8
from tests.support.tiny_networks import write_pictures

pytestmark = [
    pytest.mark.slow,
    # ray.cluster_utils leaves the log of Ray's client server open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
TANDEM = Path(sys.executable).with_name("tandem")
NODES, CPUS = 2, 2


class Running(NamedTuple):
    """Where a cluster is reached, and the store that its nodes see."""

    address: str
    client: str
    bucket: str


@pytest.fixture(scope="module")
def running(free_port):
    with pytest.MonkeyPatch.context() as patch:  # for the nodes and the commands
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with local_s3(patch) as bucket:
            port = free_port()
            node: dict[str, Any] = {"num_cpus": CPUS, "object_store_memory": 80 * 2**20}
            cluster = Cluster(True, head_node_args=node | {"ray_client_server_port": port})
            for _ in range(NODES - 1):
                cluster.add_node(**node)
            yield Running(cluster.address, f"ray://127.0.0.1:{port}", bucket)
            cluster.shutdown()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Pictures in folders, one that is none, and one that leads nowhere."""
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), 200)
    (folder / "bad.jpg").write_text("no image")
    return folder


def classify(tiny_set: Path, *arguments: object, exit_code: int = 0) -> subprocess.CompletedProcess:
    words = map(str, (TANDEM, "classify-offline", "--model-set", tiny_set, *arguments))
    done = subprocess.run(list(words), capture_output=True, text=True, timeout=120)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def test_rows_are_those_of_one_process(running, tiny_set, pictures):
    done = classify(tiny_set, "--address", running.address, "--json", pictures, exit_code=1)
    alone = tandem("classify-offline", "--model-set", tiny_set, "--json", pictures)
    rows = {line["file"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert rows == {line["file"]: line for line in map(json.loads, alone.stdout.splitlines())}
    assert "1 of 601 failed" in done.stderr


def test_from_a_store_to_a_store_by_a_client(running, tiny_set, pictures):
    client, bucket = boto3.client("s3"), running.bucket.removeprefix("s3://")
    names = {}
    for file in sorted(pictures.rglob("*.png"))[::20]:
        names[f"{running.bucket}/in/{file.parent.name} #1%/{file.name}"] = file
        client.upload_file(str(file), bucket, f"in/{file.parent.name} #1%/{file.name}")
    client.put_object(Bucket=bucket, Key="in/readme.txt", Body=b"no image")
    source, out = f"{running.bucket}/in", f"{running.bucket}/out"
    asked = ("--address", running.client, "--out", out)
    classify(tiny_set, *asked, *sorted(names)[:5])
    done = classify(tiny_set, *asked, source)
    assert f"{len(names) - 5} images classified, 5 before: {out}" in done.stderr
    (changed, *_) = sorted(names)
    client.put_object(Bucket=bucket, Key=changed.split("/", 3)[3], Body=b"no image any more")
    done = classify(tiny_set, *asked, source, exit_code=1)
    assert f"1 images classified, {len(names) - 1} before: {out}" in done.stderr
    names.pop(changed)
    filesystem, folder = pyarrow.fs.FileSystem.from_uri(out)
    table = pyarrow.parquet.read_table(folder, filesystem=filesystem)
    labels = {key_of(row): row["label"] for row in table.to_pylist() if row["label"]}
    assert labels == {name: file.parent.name for name, file in names.items()}


def test_a_set_that_no_node_has(running, pictures):
    done = classify(Path("nowhere"), "--address", running.address, pictures, exit_code=2)
    assert re.search(r"tandem: node [\d.]+: no model set .nowhere.", done.stderr)


def test_networks_that_must_not_answer(running, pictures, tmp_path):
    spoilt = both_precisions(tmp_path / "spoilt")
    spoil_int8(spoilt, "sure")
    out = tmp_path / "answers.jsonl"
    done = classify(spoilt, "--address", running.address, "--out", out, pictures, exit_code=2)
    assert "tandem: the cluster stopped: " in done.stderr
    assert "golden" in done.stderr
    assert out.read_bytes() == b""
