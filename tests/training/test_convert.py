"""Torch and OpenVINO agree; the rewrite changes nothing; two checkpoints become a set that runs."""

import json

import numpy as np
import openvino as ov
import pytest
import torch

from calibration.sets import convert
from calibration.sets.convert import NETWORKS, build_network, convert_checkpoint, save_tensors
from calibration.sets.import_network import chain_concats
from calibration.sets.input import MEAN_RGB, SCALE_RGB, with_softmax
from models.model_set import load_model_set
from tests.support.calibration.drawn_images import CLASSES
from tests.support.command_line import tandem

SIZE = 64
# OpenVINO traces with torch.jit, which torch deprecates; NNCF's own imports warn as well.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Untrained weights of both networks, with batch-norm statistics that are not the defaults."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(7)
    for name in NETWORKS:
        network = build_network(name, 3).train()
        with torch.no_grad():
            for _ in range(2):
                network(torch.randn(4, 3, SIZE, SIZE))
        save_tensors(network.state_dict(), folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("name", NETWORKS)
def test_the_folded_model_gives_what_torch_gives(name, checkpoints):
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)  # BGR
    network = build_network(name, 3).eval()
    from safetensors.torch import load_file

    network.load_state_dict(load_file(checkpoints / f"{name}.safetensors"))
    rgb = torch.from_numpy(pixels[..., ::-1].copy()).float()
    batch = ((rgb - torch.tensor(MEAN_RGB)) / torch.tensor(SCALE_RGB)).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = network(batch).softmax(1).numpy()
    model = convert_checkpoint(name, 3, checkpoints / f"{name}.safetensors", SIZE)
    # Float32, else OpenVINO may run floats as BF16 where the CPU has it.
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_allclose(compiled(pixels)[0], expected, atol=1e-4)


def test_chained_concatenations_give_the_same_result() -> None:
    torch.manual_seed(3)
    network = build_network("densenet169", 3).eval()
    model = ov.convert_model(network, example_input=torch.zeros(1, 3, SIZE, SIZE))
    image = np.random.default_rng(1).normal(size=(1, 3, SIZE, SIZE)).astype(np.float32)
    float32 = {"INFERENCE_PRECISION_HINT": "f32"}
    before = ov.Core().compile_model(with_softmax(model), "CPU", float32)(image)[0]
    num_concats = sum(node.get_type_name() == "Concat" for node in model.get_ops())
    # Every concatenation but the first two-input one of each of the four blocks.
    assert chain_concats(model) == num_concats - 4
    assert max(len(n.inputs()) for n in model.get_ops() if n.get_type_name() == "Concat") == 2
    after = ov.Core().compile_model(with_softmax(model), "CPU", float32)(image)[0]
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_two_checkpoints_become_a_measured_int8_set(
    checkpoints, training_images, held_out_images, tmp_path
):
    """Walk the model card's own way: convert, models add, quantize, evaluate."""
    labels, report, folder = tmp_path / "labels.txt", tmp_path / "report.json", tmp_path / "drawn"
    labels.write_text("".join(f"{name}\n" for name in CLASSES))
    add = ["models", "add", "drawn", "--labels", labels, "--into", tmp_path]
    for name in NETWORKS:
        xml = tmp_path / f"{name}.xml"
        convert.main(name, checkpoints / f"{name}.safetensors", xml, 3, SIZE)
        add += ["--member", f"{name}={xml}"]
    for command in (add, ["quantize", folder, "--images", training_images, "--subset-size", 8]):
        done = tandem(*command)
        assert done.exit_code == 0, (done.output, done.exception)
    done = tandem("evaluate", folder, "--images", held_out_images, "--json", report)
    assert done.exit_code in (0, 1), done.output  # untrained networks may drop by any amount
    model_set = load_model_set(str(folder))
    assert model_set.problems() == []
    (record,) = model_set.manifest.accuracy
    assert record.num_images == 12
    assert set(record.drops) == {*NETWORKS, "ensemble"}
    assert json.loads(report.read_text())["scores"]["INT8"].keys() == record.scores["INT8"].keys()
    assert tandem("models", "verify", folder).exit_code == 0
