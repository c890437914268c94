"""Sets whose members run on different runtimes: manifest, golden check, bench, evaluation."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app.graph.request import ClassifyRequest
from app.main import build
from app.serve.gateway import assemble
from app.settings import Settings
from app.telemetry.metrics import RequestObserver
from calibration.commands.models import problems_running
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.inference import Networks
from calibration.evaluation.report import keep, record_of
from calibration.offline import InProcessPipeline, LocalEnsemble, Setup
from calibration.quantization.quantize_set import Request, quantize_set
from models import golden, machine
from models.errors import ModelSetError
from models.ledger import current_records
from models.machine import MissingExtraError
from models.manifest import Network, read_manifest
from models.model_set import ModelSet, load_model_set
from models.network import RuntimeOptions, load
from models.record import FileRecord, RuntimeName
from tests.support.cases import cases
from tests.support.runtime_files import write_mixed_set
from tests.support.tiny_networks import SIZE, picture, take_golden, write_pictures, write_tiny_set

ALL: tuple[RuntimeName, ...] = ("openvino", "onnxruntime")
FILE = FileRecord(path="net.onnx", sha256="0" * 64)
EIGHT = RuntimeOptions(batch_sizes=(8,))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    folder = write_mixed_set(tmp_path_factory.mktemp("mixed") / "tiny", runtimes=ALL)
    return load_model_set(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set that may be changed."""
    return write_mixed_set(tmp_path / "tiny", runtimes=ALL)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures")


def test_every_runtime_answers_the_golden_images_alike_and_no_others(mixed, tmp_path):
    one, two = (
        write_mixed_set(tmp_path / name, runtimes=ALL, gain=gain)
        for name, gain in (("one", 8.0), ("two", -8.0))
    )
    take_golden(one, two)
    swapped, rows = load_model_set(str(one)), {}
    assert mixed.golden is not None
    assert swapped.golden is not None
    for name in ALL:
        network = load(mixed.network_path(name, "FP16"), EIGHT)
        assert network.runtime == name
        golden.check(mixed.golden, name, "FP16", network)
        rows[name] = network.predict(golden.golden_images(SIZE)[:8])
        np.testing.assert_allclose(rows[name], rows["openvino"], atol=1e-4)
        other = load(swapped.network_path(name, "FP16"), EIGHT)
        with pytest.raises(golden.GoldenMismatchError, match="does not answer as where"):
            golden.check(swapped.golden, name, "FP16", other)


def test_verify_and_bound_and_evaluation_run_it_and_it_classifies_without_a_service(mixed):
    assert (mixed.problems(), problems_running(mixed)) == ([], [])
    pipeline = InProcessPipeline(mixed, "FP16", Setup(2, 1, 1))
    assert pipeline.answer([picture("green"), picture("red")]).argmax(1).tolist() == [1, 2]
    assert set(Networks(mixed, ["FP16"]).cpu_ms_per_image()) == set(ALL)
    assert LocalEnsemble(mixed, "INT8").classify(picture("red")).label == "mostly red"


async def test_the_service_in_process_answers_as_the_networks_do(mixed):
    """Through the Gateway's graph: queue, threads, golden check, average."""
    settings = Settings(model_set=str(mixed.folder), compile_cache=None, batch_sizes=(1, 2, 4))
    graph = assemble(settings)  # at INT8, the default: the others have one network, which runs
    served = graph.service.served_models().members
    assert {m.name: m.precision for m in served} == {"openvino": "INT8", "onnxruntime": "FP16"}
    bodies = [picture(color) for color in ("blue", "green", "red")]
    request = ClassifyRequest(bodies, 3, 30.0, "test", RequestObserver(), cache_use="off")
    answers = await graph.service.classify(request)
    alone = RuntimeOptions(batch_sizes=(1,))
    networks = {str(name): load(mixed.network_path(name, "FP16"), alone) for name in ALL}
    for body, answer in zip(bodies, answers, strict=True):
        image = mixed.manifest.inputs.read(body)[None]
        expected = np.mean([n.predict(image)[0] for n in networks.values()], axis=0)
        assert answer.predictions[0].probability == pytest.approx(float(expected.max()), abs=1e-4)
        assert set(answer.members) == set(networks)
    for member in served:
        network = networks[member.name]
        assert member.runtime.name == network.runtime
        assert network.version.startswith(member.runtime.version)  # OpenVINO's tells the build too


@pytest.mark.parametrize(("num_threads", "num_streams", "pool"), [(1, 1, 1), (2, 2, 1), (4, 2, 3)])
def test_onnx_runtimes_threads_are_no_more_than_given(num_threads, num_streams, pool):
    """Callers compute too: as many as streams, beside a pool that is one less than is said."""
    import onnxruntime

    from models.onnx_runtime import _session_options

    chosen = _session_options(onnxruntime, RuntimeOptions(num_threads, num_streams=num_streams))
    assert (chosen.intra_op_num_threads, num_streams + (pool - 1)) == (pool, num_threads)
    assert chosen.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_what_is_not_for_openvino_is_not_quantised(folder, pictures):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelSetError, match="member onnxruntime runs on onnxruntime: tandem q"):
        quantize_set(
            load_model_set(str(folder)), Request(pictures, members=("onnxruntime",), subset_size=4)
        )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_member_with_one_network_runs_it_at_any_precision(tmp_path):
    model_set = load_model_set(str(write_mixed_set(tmp_path / "tiny", runtimes=("onnxruntime",))))
    assert model_set.network_path("onnxruntime", "INT8").name == "onnxruntime.onnx"
    tiny = load_model_set(str(write_tiny_set(tmp_path / "float", precision="FP16")))
    with pytest.raises(ModelSetError, match="member sure has no INT8 network"):
        tiny.network_path("sure", "INT8")


def test_the_ledger_ties_a_record_to_every_runtimes_file(folder, pictures):
    model_set = load_model_set(str(folder))
    measured = evaluate_set(model_set, read_dataset(pictures, model_set), ("INT8",))
    keep(folder, record_of(model_set, measured))
    manifest = read_manifest(folder)
    (record,) = current_records(manifest)
    assert set(record.fingerprints["onnxruntime"]) == {"FP16"}
    assert set(record.cpu_ms_per_image["onnxruntime"]) == {"INT8"}
    assert record.scores["INT8"]["ensemble"].top1 == 1.0
    assert "onnxruntime" in record.versions
    other = {"networks": {"FP16": Network(runtime="onnxruntime", file=FILE)}}
    changed = tuple(
        m.model_copy(update=other) if m.name == "onnxruntime" else m for m in manifest.members
    )
    assert current_records(manifest.model_copy(update={"members": changed})) == []


@cases(
    "facts, says",
    ({"runtime": "onnxruntime"}, "is one file, a .onnx"),
    ({"runtime": "torch", "file": FILE}, r"torch runs no members .* its own \.pt2 files"),
    (
        {"runtime": "torchscript", "file": FILE},
        r"torchscript runs no members .* \.torchscript files.*--trust",
    ),
    ({"file": FILE}, "an OpenVINO network is xml and bin"),
    ({}, "an OpenVINO network is xml and bin"),
    ({"runtime": "tensorrt", "file": FILE}, "'openvino' or 'onnxruntime'"),
)
def test_a_network_whose_files_are_not_its_runtimes(facts, says):
    with pytest.raises(ValueError, match=says):
        Network.model_validate(facts)


def test_a_manifest_from_before_there_were_runtimes():
    networks = read_manifest(Path("models/imagenette")).members[0].networks
    assert {network.runtime for network in networks.values()} == {"openvino"}
    assert networks["INT8"].files == (networks["INT8"].xml, networks["INT8"].bin)


def test_a_runtime_that_is_not_installed(folder, monkeypatch):
    """Told before anything is served: before Ray starts, and where the graph is bound."""
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "onnxruntime" else name)
    for use in (
        lambda: load_model_set(str(folder)).network_path("onnxruntime", "FP16"),
        lambda: build(Settings(model_set=str(folder), precision="FP16")),
    ):
        with pytest.raises(MissingExtraError, match=r"needs on.*'tandem-serve\[on"):
            use()


USES_OPENVINO_ALONE = """
import sys
from app.serve.gateway import assemble
from app.settings import Settings
assemble(Settings(model_set=sys.argv[1], compile_cache=None))
import app.main, calibration.offline
from app.launch.forks import MODULES
from app.launch.forks import import_all
import_all(MODULES)
print([name for name in ("torch", "onnxruntime", "onnx") if name in sys.modules])
"""


def test_who_uses_openvino_alone_imports_no_other_runtime(tmp_path):
    """What a service's process imports and runs for a set like the bundled one."""
    command = [sys.executable, "-c", USES_OPENVINO_ALONE, str(write_tiny_set(tmp_path / "tiny"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
