"""Sets whose members run on different runtimes: manifest, golden check, bench, evaluation."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app.bench.upper_bound import InProcessPipeline, Setup
from app.cli.models import _problems_running
from app.main import build
from app.settings import Settings
from calibration.evaluation.inference import Networks
from models import extras, golden
from models.extras import MissingExtraError
from models.manifest import Network, read_manifest
from models.model_set import ModelSet, load_model_set
from models.record import FileRecord, RuntimeName
from models.runtimes.load import load, runtime_of
from models.runtimes.options import RuntimeOptions
from tests.support.runtime_files import tiny_onnx, write_mixed_set
from tests.support.tiny_networks import SIZE, picture, take_golden, write_tiny_set

ALL: tuple[RuntimeName, ...] = ("openvino", "onnxruntime", "torch")
WITHOUT_TORCH: tuple[RuntimeName, ...] = ("openvino", "onnxruntime")
FILE = FileRecord(path="net.onnx", sha256="0" * 64)


@pytest.fixture(
    scope="module", params=[WITHOUT_TORCH, pytest.param(ALL, marks=pytest.mark.torch)], ids=len
)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    folder = write_mixed_set(tmp_path_factory.mktemp("mixed") / "tiny", runtimes=request.param)
    return load_model_set(str(folder))


def test_every_runtime_answers_the_golden_images_alike(mixed):
    assert mixed.golden is not None
    rows = {}
    for member in mixed.manifest.members:
        network = load(mixed.network_path(member.name, "FP16"), RuntimeOptions(batch_sizes=(8,)))
        assert network.runtime == member.name
        golden.check(mixed.golden, member.name, "FP16", network)
        rows[member.name] = network.predict(golden.golden_images(SIZE)[:8])
    for found in rows.values():
        np.testing.assert_allclose(found, rows["openvino"], atol=1e-4)


def test_the_golden_check_holds_for_every_runtime(mixed, tmp_path):
    runtimes = tuple(member.name for member in mixed.manifest.members)
    one, two = (
        write_mixed_set(tmp_path / name, runtimes=runtimes, gain=gain)
        for name, gain in (("one", 8.0), ("two", -8.0))
    )
    take_golden(one, two)
    model_set = load_model_set(str(one))
    for name in runtimes:
        network = load(model_set.network_path(name, "FP16"), RuntimeOptions(batch_sizes=(8,)))
        with pytest.raises(golden.GoldenMismatchError, match="does not answer as where"):
            golden.check(model_set.golden, name, "FP16", network)


def test_verify_and_bound_and_evaluation_run_it(mixed):
    assert mixed.problems() == []
    assert _problems_running(mixed) == []
    pipeline = InProcessPipeline(mixed, "FP16", Setup(2, 1, 1))
    rows = pipeline.answer([picture("green"), picture("red")])
    assert rows.argmax(1).tolist() == [1, 2]
    assert set(Networks(mixed, ["FP16"]).cpu_ms_per_image()) == {
        member.name for member in mixed.manifest.members
    }


def test_what_a_set_is_changes_with_any_file(mixed, tmp_path):
    runtimes = tuple(member.name for member in mixed.manifest.members)
    other = load_model_set(str(write_mixed_set(tmp_path / "tiny", runtimes=runtimes, gain=7.0)))
    assert other.fingerprint("FP16") != mixed.fingerprint("FP16")
    for before, after in zip(mixed.manifest.members, other.manifest.members, strict=True):
        assert before.networks["FP16"].fingerprint != after.networks["FP16"].fingerprint


def test_an_altered_file_is_not_loaded(tmp_path):
    folder = write_mixed_set(tmp_path / "tiny", runtimes=WITHOUT_TORCH)
    (folder / "onnxruntime.onnx").write_bytes(tiny_onnx(gain=9.0))
    with pytest.raises(Exception, match=r"onnxruntime\.onnx was altered"):
        load_model_set(str(folder)).network_path("onnxruntime", "FP16")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"runtime": "onnxruntime"}, "is one file, a .onnx"),
        ({"runtime": "torch", "file": FILE}, "'net.onnx' is for torch: it must end in .pt2"),
        ({"file": FILE}, "an OpenVINO network is xml and bin"),
        ({}, "an OpenVINO network is xml and bin"),
        ({"runtime": "tensorrt", "file": FILE}, "'openvino', 'onnxruntime' or 'torch'"),
    ],
)
def test_a_network_whose_files_are_not_its_runtimes(facts, says):
    with pytest.raises(ValueError, match=says):
        Network.model_validate(facts)


def test_a_manifest_from_before_there_were_runtimes():
    networks = read_manifest(Path("models/imagenette")).members[0].networks
    assert {network.runtime for network in networks.values()} == {"openvino"}
    assert networks["INT8"].files == (networks["INT8"].xml, networks["INT8"].bin)


@pytest.mark.parametrize("name", ["net.pkl", "net.pt", "net.tflite", "net"])
def test_files_that_no_runtime_opens(name):
    with pytest.raises(Exception, match=r"no runtime for net.*\.xml \(openvino\)"):
        runtime_of(Path(name))


def test_a_runtime_that_is_not_installed(tmp_path, monkeypatch):
    """Told before anything is served: before Ray starts, and where the graph is bound."""
    folder = write_mixed_set(tmp_path / "tiny", runtimes=WITHOUT_TORCH)
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnxruntime" else name)
    for use in (
        lambda: load_model_set(str(folder)).network_path("onnxruntime", "FP16"),
        lambda: build(Settings(model_set=str(folder), precision="FP16")),
    ):
        with pytest.raises(MissingExtraError, match=r"needs on.*'tandem\[on"):
            use()


USES_OPENVINO_ALONE = """
import sys
from app.deployments.assembly import assemble
from app.settings import Settings
assemble(Settings(model_set=sys.argv[1], compile_cache=None, trace_dir=None))
import app.main, app.bench.upper_bound, app.launch.forks.running
for module in app.launch.forks.running.MODULES:
    __import__(module)
print([name for name in ("torch", "onnxruntime", "onnx") if name in sys.modules])
"""


def test_who_uses_openvino_alone_imports_no_other_runtime(tmp_path):
    """What a service's process imports and runs for a set like the bundled one."""
    folder = write_tiny_set(tmp_path / "tiny")
    command = [sys.executable, "-c", USES_OPENVINO_ALONE, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
