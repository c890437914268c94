"""``tandem models`` on sets made in code, whole and spoilt."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from calibration.sets.transaction import write_manifest
from models import machine
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.record import FileRecord
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.plans import planned
from tests.support.runtime_files import write_mixed_set
from tests.support.tiny_networks import with_accuracy, write_tiny_set


@pytest.fixture
def sets(tiny_set, tmp_path) -> Path:
    shutil.copytree(tiny_set, tmp_path / "sets" / "tiny")
    return tmp_path / "sets"


def models(*arguments):
    return tandem("models", *arguments)


def test_own_sets_are_listed_beside_the_bundled(sets):
    result = models("list", "--model-dir", sets, "--json")
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert {"tiny", "imagenette"} <= set(rows)
    assert rows["tiny"] == {
        "folder": str(sets / "tiny"),
        "name": "tiny",
        "num_classes": 3,
        "input_size": 16,
        "input_sizes": [16],
        "fixed_batch": {},
        "preprocess": None,
        "members": ["sure", "unsure"],
        "runtimes": {"sure": ["openvino"], "unsure": ["openvino"]},
        "runtime_versions": {"openvino": version("openvino")},
        "top1": {},
        "mean_average_precision": {},
        "task": "classification",
        "threshold": None,
    }
    table = models("list", "--model-dir", sets).stdout
    assert "tiny" in table
    assert "not measured" in table


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_manifest_that_cannot_be_read_hides_no_other_set(sets, form):
    (sets / "bad").mkdir()
    (sets / "bad" / "manifest.yaml").write_text("name: bad\nmeasured: 2026-13-21\n", "utf-8")
    result = models("list", "--model-dir", sets, *form)
    assert result.exit_code == 1
    assert "tiny" in result.stdout
    assert "imagenette" in result.stdout
    assert f"left out: {sets}/bad/manifest.yaml is not YAML" in result.stderr
    assert "month must be in 1..12" in result.stderr


def test_a_set_that_ran_on_pytorch_is_refused_with_what_to_do(sets):
    folder = write_tiny_set(sets / "old", name="old")
    file = {"path": "net.pt2", "sha256": "0" * 64}
    member = {"name": "m", "source": "x", "networks": {"FP16": {"runtime": "torch", "file": file}}}
    rewrite(folder, members=[member])
    told = "tandem models add NAME --member MEMBER=FILE --labels labels.txt --trust"
    shown = models("list", "--model-dir", sets)
    assert "tiny" in shown.stdout
    assert told in shown.stderr
    refused = models("verify", "old", "--model-dir", sets)
    assert isinstance(refused.exception, ModelSetError)
    assert "members.0.networks.FP16.runtime" in refused.exception.message
    assert told in refused.exception.message


def test_a_record_without_an_ensemble_is_no_obstacle(tmp_path):
    folder = write_tiny_set(tmp_path / "one", name="one")
    write_manifest(folder, with_accuracy(read_manifest(folder), {"sure": 1.0}))
    result = models("list", "--model-dir", tmp_path)
    assert result.exit_code == 0, result.exception
    assert "not measured" in result.stdout


def test_what_a_plan_measured_is_listed_without_a_record(sets):
    planned(sets / "tiny", (("sure",), 0.9), (("unsure",), None))
    top1 = read_manifest(sets / "tiny").fast_plan.judged.full_top1
    assert f"INT8 {top1:.4f}" in models("list", "--model-dir", sets).stdout


def test_the_ensembles_accuracy_is_listed_until_the_networks_change(tmp_path):
    folder = write_tiny_set(tmp_path / "one", name="one")
    write_manifest(folder, with_accuracy(read_manifest(folder), {"sure": 1.0, "ensemble": 0.5}))
    facts = json.loads(models("list", "--model-dir", tmp_path, "--json").stdout)
    assert [f["top1"] for f in facts if f["name"] == "one"] == [{"INT8": 0.5}]
    other = write_tiny_set(tmp_path / "two", name="two", gains={"sure": 3.0})
    manifest = read_manifest(folder).model_copy(update={"members": read_manifest(other).members})
    write_manifest(folder, manifest)
    facts = json.loads(models("list", "--model-dir", tmp_path, "--json").stdout)
    assert [f["top1"] for f in facts if f["name"] == "one"] == [{}]


def test_a_whole_set(sets):
    result = models("verify", "tiny", "--model-dir", sets)
    assert result.exit_code == 0, result.output
    assert "ok tiny: 5 files, every network runs; no golden answers recorded" in result.stdout
    as_json = json.loads(models("verify", sets / "tiny", "--json").stdout)
    assert as_json == {"set": "tiny", "ok": True, "problems": []}


def alter(folder: Path) -> None:
    (folder / "sure.bin").write_bytes(b"other")


def lose(folder: Path) -> None:
    (folder / "unsure.xml").unlink()


def rewrite(folder: Path, **changes: object) -> None:
    content = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content | changes), "utf-8")


def forget_a_label(folder: Path) -> None:
    (folder / "labels.txt").write_text("blue\ngreen\n")
    rewrite(folder, labels=FileRecord.of(folder, "labels.txt").model_dump())


def claim_another_size(folder: Path) -> None:
    rewrite(folder, image={"input_size": 32, "resize_shorter": 32})


def break_a_network(folder: Path) -> None:
    (folder / "sure.xml").write_text("<net/>")
    content = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    xml = FileRecord.of(folder, "sure.xml").model_dump()
    content["members"][0]["networks"]["INT8"]["xml"] = xml
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content), "utf-8")


@cases(
    "spoil, says",
    (alter, "sure.bin was altered"),
    (lose, "unsure.xml is missing"),
    (forget_a_label, "has 2 labels, the manifest says num_classes: 3"),
    (claim_another_size, "the network takes 16x16"),
    (break_a_network, "sure.xml"),
)
def test_a_spoilt_set(sets, spoil, says):
    spoil(sets / "tiny")
    result = models("verify", "tiny", "--model-dir", sets)
    assert result.exit_code == 1
    assert says in result.stdout
    answer = json.loads(models("verify", "tiny", "--model-dir", sets, "--json").stdout)
    assert not answer["ok"]
    assert says in " ".join(answer["problems"])


def test_a_runtime_that_is_not_installed_is_a_problem_as_others(tmp_path, monkeypatch):
    folder = write_mixed_set(tmp_path / "mixed", runtimes=("openvino", "onnxruntime"))
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "onnxruntime" else name)
    result = models("verify", folder, "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith(f"{folder / 'onnxruntime.onnx'}: ")
    assert "pip install 'tandem-serve[onnxruntime]'" in problem


def with_float_networks(folder: Path) -> list[Path]:
    """Give every member a second precision; return its files."""
    content = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    made = []
    for member in content["members"]:
        files = {}
        for kind in ("xml", "bin"):
            path = folder / f"{member['name']}-float.{kind}"
            shutil.copy(folder / f"{member['name']}.{kind}", path)
            files[kind] = FileRecord.of(folder, path.name).model_dump()
            made.append(path)
        member["networks"]["FP16"] = files
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return made


def test_float_networks_may_be_absent_as_a_whole(sets):
    files = with_float_networks(sets / "tiny")
    whole = models("verify", sets / "tiny").stdout
    assert "9 files" in whole
    assert "not here" not in whole
    for path in files[1:]:
        path.unlink()
    damaged = models("verify", sets / "tiny")
    assert damaged.exit_code == 1
    assert damaged.stdout.count("is missing") == len(files) - 1
    files[0].unlink()
    result = models("verify", sets / "tiny")
    assert result.exit_code == 0, result.output
    assert "5 files" in result.stdout
    assert "FP16 is not here" in result.stdout


def test_a_set_without_any_network_is_damaged(sets):
    with_float_networks(sets / "tiny")
    for path in [*(sets / "tiny").glob("*.xml"), *(sets / "tiny").glob("*.bin")]:
        path.unlink()
    result = models("verify", sets / "tiny")
    assert (result.exit_code, result.stdout.count("is missing")) == (1, 8)


def test_a_path_with_brackets_is_shown_as_it_is(sets, tmp_path):
    folder = Path(shutil.move(sets / "tiny", tmp_path / "my [bold] [/] sets"))
    lose(folder)
    result = models("verify", folder)
    assert result.exit_code == 1, result.exception
    assert str(folder / "unsure.xml") in result.stdout


@cases(
    "changes, says",
    ({"colour": 1}, "colour: Extra inputs"),
    ({"labels": {"path": "../labels.txt", "sha256": "0" * 64}}, "stay inside it"),
)
def test_a_manifest_that_cannot_be_used(sets, changes, says):
    rewrite(sets / "tiny", **changes)
    result = models("verify", "tiny", "--model-dir", sets)
    assert isinstance(result.exception, ModelSetError)  # main() makes one line of it
    assert says in result.exception.message
