"""``tandem classify-offline --address`` without a cluster: what nodes are asked, and do.

tests/integration/test_offline_cluster.py runs the command on two nodes.
"""

import json
from pathlib import Path
from typing import Any

import boto3
import pyarrow
import pytest
import ray

from app.cli import cluster_rows
from app.cli.cluster_rows import ClusterRows, NodeClassifier
from app.errors import ConfigError
from models import machine
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.object_stores import local_s3
from tests.support.tiny_networks import LABELS, picture, write_pictures

Node = dict[str, Any]


def node(name: str, cpus: float = 8, alive: bool = True) -> Node:
    return {
        "NodeID": name.encode().hex().ljust(56, "0"),
        "NodeManagerAddress": name,
        "Alive": alive,
        "Resources": {"CPU": cpus} if cpus else {},
    }


class CalledHere:
    """A remote function that runs in this process."""

    def __init__(self, function):
        self.remote = function

    def options(self, **_: object) -> "CalledHere":
        return self


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes of a cluster, all of them this process."""
    there = [node("head", cpus=0), node("a"), node("gone", cpus=2, alive=False), node("b", cpus=3)]
    monkeypatch.setattr(ray, "nodes", lambda: there)
    monkeypatch.setattr(ray, "remote", CalledHere)
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    return there


def test_the_set_is_that_of_the_nodes_with_cpus(nodes, tiny_set):
    cluster, held = ClusterRows(str(tiny_set)), load_model_set(str(tiny_set))
    assert cluster.model_version == held.fingerprint("INT8")
    assert cluster.manifest.num_classes == len(LABELS)


@cases("cpus, cores, pool", ([8, 3], 3, 3), ([64, 32], 4, 24), ([1], 1, 1), ([6, 6], 4, 2))
def test_processes_fit_every_node(nodes, tiny_set, cpus, cores, pool):
    nodes[:] = [node(str(number), count) for number, count in enumerate(cpus)]
    cluster = ClusterRows(str(tiny_set))
    assert (cluster._cores, cluster._pool) == (cores, pool)


def test_a_cluster_without_cpus(nodes, tiny_set):
    del nodes[1:]
    with pytest.raises(ConfigError, match="no node with a CPU; start one: ray start"):
        ClusterRows(str(tiny_set))


def test_a_node_without_the_set(nodes, tmp_path):
    with pytest.raises(ConfigError, match=r"^node a: no model set .*nowhere"):
        ClusterRows(str(tmp_path / "nowhere"))


def test_a_node_without_pandas(nodes, tiny_set, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^node a: .* needs pandas.*tandem-serve\[ray-data\]"):
        ClusterRows(str(tiny_set))


def test_a_node_without_tandem(nodes, tiny_set, monkeypatch):
    def refuse(_: object) -> None:
        raise ray.exceptions.RayError("Traceback\nModuleNotFoundError: No module named 'app'")

    monkeypatch.setattr(ray, "get", refuse)
    told = r"^node a: ModuleNotFoundError: No module named 'app'; install Tandem there"
    with pytest.raises(ConfigError, match=told):
        ClusterRows(str(tiny_set))


def test_nodes_with_other_versions(nodes, tiny_set, monkeypatch):
    manifest, versions = load_model_set(str(tiny_set)).manifest, iter(["0123", "4567"])
    monkeypatch.setattr(cluster_rows, "_inspected", lambda _: (next(versions), manifest))
    with pytest.raises(ConfigError, match="in versions 0123, 4567; copy one to all"):
        ClusterRows(str(tiny_set))


@pytest.fixture
def bucket(monkeypatch):
    with local_s3(monkeypatch) as url:
        yield url


def test_names_are_those_that_a_node_sees(nodes, tiny_set, tmp_path, bucket):
    boto3.client("s3").put_object(Bucket=bucket[5:], Key="in/a.png", Body=picture())
    cluster, folder = ClusterRows(str(tiny_set)), write_pictures(tmp_path, 1)
    local = sorted(map(str, folder.rglob("*.png")))
    assert cluster.find([str(folder), f"{bucket}/in", local[0]]) == [*local, f"{bucket}/in/a.png"]
    with pytest.raises(ConfigError, match="node a: no such file or folder: none"):
        cluster.find(["none"])


def test_files_are_read_and_classified_as_in_one_process(tiny_set, tmp_path, bucket, monkeypatch):
    boto3.client("s3").put_object(Bucket=bucket[5:], Key="in/a.png", Body=picture("red"))
    good, bad, gone = (str(tmp_path / name) for name in ("good.png", "bad.png", "gone.png"))
    Path(good).write_bytes(picture("blue"))
    Path(bad).write_text("no image")
    files = [good, bad, gone, f"{bucket}/in/a.png", f"{bucket}/in/b.png"]
    monkeypatch.setattr(cluster_rows, "READERS", 2)
    read = pyarrow.concat_tables(cluster_rows._read(pyarrow.table({"file": files})))
    done = NodeClassifier(str(tiny_set), 1, "full", "INT8", 2, None)(read)
    rows = [json.loads(text) for text in done["row"].to_pylist()]
    assert [row["file"] for row in rows] == files
    labels = [row["predictions"][0]["label"] for row in rows if "error" not in row]
    assert labels == ["mostly blue", "mostly red"]
    errors = [row["error"]["code"] for row in rows if "error" in row]
    assert errors == ["not_an_image", "unreadable", "unreadable"]
    alone = tandem("classify-offline", "--model-set", tiny_set, "--json", "--top-k", 2, good)
    assert rows[0] == json.loads(alone.stdout)


def test_rows_come_until_there_are_no_more(nodes, tiny_set, monkeypatch):
    """What the nodes' driver returns is passed on, until it has no more."""
    parts: list[list[str] | None] = [['{"file": "a"}', '{"file": "b"}'], [], ['{"file": "c"}']]
    cluster, asked = ClusterRows(str(tiny_set), "fast"), []

    class Driver:
        def __init__(self, *arguments: object) -> None:
            asked.append(arguments)
            self.next = CalledHere(iter([*parts, None, None]).__next__)

    monkeypatch.setattr(cluster_rows, "Driver", Driver)
    rows = list(cluster.rows(["a", "b", "c"], 1, None))
    assert [row["file"] for row in rows] == ["a", "b", "c"]
    assert list(cluster.rows([], 1, None)) == []  # all were answered before
    assert asked == [(["a", "b", "c"], (str(tiny_set), 3, "fast", "INT8", 1, None, None), 3)]


def test_nobody_at_the_address(tmp_path, free_port):
    where = f"ray://127.0.0.1:{free_port()}"
    done = tandem("classify-offline", "--address", where, tmp_path)
    assert f"no Ray cluster at {where}: Connection refused" in str(done.exception)
