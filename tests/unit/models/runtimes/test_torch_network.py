"""PyTorch's exported programs: rows, batches, and files that are more than a network."""

import io
import pickle
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from models.errors import ModelSetError
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions
from models.runtimes.torch_archive import ArchiveError
from tests.support.runtime_files import export_module, rewritten_pt2, write_tiny_pt2
from tests.support.tiny_networks import SIZE

pytestmark = pytest.mark.torch
OPTIONS = RuntimeOptions(batch_sizes=(1, 4))


def images(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def expected(batch: np.ndarray, gain: float = 4.0) -> np.ndarray:
    exponentials = np.exp(gain * batch.mean((1, 2)) / 255)
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def pt2(tmp_path_factory) -> Path:
    return write_tiny_pt2(tmp_path_factory.mktemp("pt2") / "tiny.pt2")


@pytest.fixture(scope="module")
def pt2_of_two(tmp_path_factory) -> Path:
    return write_tiny_pt2(tmp_path_factory.mktemp("pt2") / "two.pt2", batch=2)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_of_any_size_gives_its_own_rows(pt2, pt2_of_two, count):
    for path, fixed in ((pt2, None), (pt2_of_two, 2)):
        network = load(path, OPTIONS)
        assert network.fixed_batch == fixed
        rows = network.predict(images(count))
        assert (rows.dtype, rows.shape) == (np.float32, (count, 3))
        np.testing.assert_allclose(rows, expected(images(count)), atol=1e-5)


def test_what_the_network_says_of_itself(pt2):
    network = load(pt2, OPTIONS)
    assert (network.runtime, network.num_threads, network.batch_sizes) == ("torch", 1, (1, 4))
    assert (network.input_shape, network.num_classes) == ((SIZE, SIZE, 3), 3)
    assert network.version.count(".") == 2
    network.warm_up()
    network.check_fits(SIZE, 3)


@pytest.mark.parametrize(("num_threads", "num_streams", "each"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_a_batch_has_the_threads_it_was_given(pt2, num_threads, num_streams, each):
    """On whatever thread it runs, and not as many as there are cores."""
    import torch

    network = load(pt2, RuntimeOptions(num_threads, num_streams=num_streams))
    found: list[int] = []

    def run() -> None:
        network.predict(images(1))
        found.append(torch.get_num_threads())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [each, each]


def test_read_only_images_are_taken_without_a_warning(pt2):
    batch = images(2)
    batch.flags.writeable = False  # as Ray hands them over
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(pt2, OPTIONS).predict(batch)


def test_an_answer_is_not_overwritten_by_the_next_run(pt2):
    network = load(pt2, OPTIONS)
    first = network.predict(images(2))
    before = first.copy()
    network.predict(255 - images(2))
    np.testing.assert_array_equal(first, before)


class Attack:
    """What a pickle may do as it is loaded."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self):
        return Path.write_text, (self._place, "it ran")


def test_no_pickle_is_loaded(pt2, tmp_path):
    """A pickle in place of the sample inputs is never opened; of a weight, it is refused."""
    place = tmp_path / "it-ran"
    attack = pickle.dumps(Attack(place))
    pickle.loads(attack)
    assert place.read_text() == "it ran"  # as it would
    place.unlink()

    changed = rewritten_pt2(pt2, tmp_path / "inputs.pt2", entries={"/model.pt": attack})
    load(changed, OPTIONS).predict(images(1))
    assert not place.exists()

    config = (
        '{"config": {"gain": {"path_name": "weight_0", "is_param": false, "use_pickle": true}}}'
    )
    entries = {"/weight_0": attack, "model_weights_config.json": config.encode()}
    changed = rewritten_pt2(pt2, tmp_path / "weights.pt2", entries=entries)
    with pytest.raises(ArchiveError, match="is pickled, and no pickle is loaded"):
        load(changed, OPTIONS)
    assert not place.exists()


def test_a_bare_pickle_under_another_name(tmp_path):
    place = tmp_path / "it-ran"
    path = tmp_path / "net.pt2"
    path.write_bytes(pickle.dumps(Attack(place)))
    with pytest.raises(ArchiveError, match=r"is no \.pt2 file"):
        load(path, OPTIONS)
    assert not place.exists()


def test_a_checkpoint_is_refused_by_what_it_is(tmp_path):
    import torch

    torch.save({"weights": torch.zeros(3)}, tmp_path / "net.pt2")
    with pytest.raises(ArchiveError, match=r"a checkpoint of torch\.save, a pickle"):
        load(tmp_path / "net.pt2", OPTIONS)


def test_torchscript_by_the_wrong_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as opened:
        opened.writestr("net/data.pkl", pickle.dumps(Attack(tmp_path / "it-ran")))
        opened.writestr("net/code/__torch__.py", "def __setstate__(self, state): ...")
    with pytest.raises(ArchiveError, match=r"is TorchScript, .* call it net\.torchscript"):
        load(tmp_path / "net.pt2", OPTIONS)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        ("torch.serialization.os.system", [("command", {"as_string": "touch it-ran"})]),
        ("torch.hub.load", [("repo", {"as_string": "somebody/else"})]),
        ("_operator.call", [("f", {"as_string": "print"})]),
        ("#anything.at_all", []),
        ("torch.ops.higher_order.cond", []),
        ("torch.ops.somebodys.op.default", []),
        ("torch.ops.aten.from_file.default", [("filename", {"as_string": "it-ran"})]),
        ("torch.ops.aten.__class__.mro", []),
        ("torch.ops.aten.no_such_operator.default", []),
    ],
)
def test_operators_that_are_none_of_a_network(pt2, tmp_path, target, inputs):
    def change(program):
        first = program["graph_module"]["graph"]["nodes"][0]
        first["target"] = target
        first["inputs"] = [{"name": n, "arg": arg, "kind": 1} for n, arg in inputs]

    changed = rewritten_pt2(pt2, tmp_path / "changed.pt2", change)
    with pytest.raises(ArchiveError, match=r"no operator of a network|which PyTorch .* lacks"):
        load(changed, OPTIONS)
    assert not Path("it-ran").exists()


def test_a_text_argument_that_is_no_mode(pt2, tmp_path):
    def change(program):
        node = program["graph_module"]["graph"]["nodes"][-1]
        node["inputs"].append({"name": "filename", "arg": {"as_string": "x"}, "kind": 2})

    with pytest.raises(ArchiveError, match=r"has filename = 'x' \(as_string\), which is not read"):
        load(rewritten_pt2(pt2, tmp_path / "changed.pt2", change), OPTIONS)


def test_expressions_are_not_evaluated(pt2, tmp_path):
    """torch.export.load gives these to SymPy, which evaluates them as Python."""
    attack = f"__import__('pathlib').Path({str(tmp_path / 'it-ran')!r}).touch()"

    def change(program):
        program["range_constraints"] = {attack: {"min_val": 1, "max_val": 4}}
        program["guards_code"] = [attack]
        graph = program["graph_module"]["graph"]
        for meta in graph["tensor_values"].values():
            for side in meta["sizes"]:
                if "as_expr" in side:
                    side["as_expr"]["expr_str"] = attack

    changed = rewritten_pt2(pt2, tmp_path / "changed.pt2", change)
    load(changed, OPTIONS).predict(images(2))
    assert not (tmp_path / "it-ran").exists()


def other_schema(program):
    program["schema_version"]["major"] = 9


def no_signature(program):
    del program["graph_module"]["signature"]


def unknown_name(program):
    node = program["graph_module"]["graph"]["nodes"][0]
    node["inputs"][0]["arg"] = {"as_tensor": {"name": "nobody"}}


def no_last_nodes(program):
    del program["graph_module"]["graph"]["nodes"][1:]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (unknown_name, "reads 'nobody' before"),
        (no_last_nodes, "nothing gives '"),
        (other_schema, "schema 9 .*schema 8 is read"),
        (no_signature, "damaged: KeyError 'signature'"),
    ],
)
def test_a_program_of_another_kind(pt2, tmp_path, change, says):
    with pytest.raises(ArchiveError, match=says):
        load(rewritten_pt2(pt2, tmp_path / "changed.pt2", change), OPTIONS)


def test_weights_that_do_not_fit_their_bytes(pt2, tmp_path):
    changed = rewritten_pt2(pt2, tmp_path / "changed.pt2", entries={"/weight_0": b"\0" * 4})
    with pytest.raises(ArchiveError, match="gain does not fit its bytes"):
        load(changed, OPTIONS)


def test_a_compressed_entry(pt2, tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(pt2) as before, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as out:
        for name in before.namelist():
            out.writestr(name, before.read(name))
    (tmp_path / "packed.pt2").write_bytes(content.getvalue())
    with pytest.raises(ArchiveError, match="is compressed"):
        load(tmp_path / "packed.pt2", OPTIONS)


def test_a_float_program_is_told_from_a_member(tmp_path):
    import torch

    class Means(torch.nn.Module):
        def forward(self, image):
            return image.mean((2, 3))

    export_module(Means(), tmp_path / "float.pt2", torch.zeros(2, 3, SIZE, SIZE))
    with pytest.raises(ModelSetError, match="models add folds the preprocessing in"):
        load(tmp_path / "float.pt2", OPTIONS)


def test_a_network_like_real_ones_answers_as_the_module_does(tmp_path):
    """Convolutions, batch norm, sizes that are computed, several outputs of one operator."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.last = torch.nn.Linear(8, 5)

        def forward(self, pixels):
            planes = pixels.permute(0, 3, 1, 2)[:, [2, 1, 0]].float() / 255
            first, second = torch.relu(self.norm(self.conv(planes))).chunk(2, dim=1)
            joined = torch.cat([torch.nn.functional.gelu(first, approximate="tanh"), second], 1)
            pooled = torch.nn.functional.adaptive_avg_pool2d(joined, 1)
            return torch.softmax(self.last(pooled.view(pooled.shape[0], -1)), 1)

    torch.manual_seed(0)
    module = Net().eval()
    batch = images(3)
    export_module(module, tmp_path / "net.pt2", torch.zeros(2, SIZE, SIZE, 3, dtype=torch.uint8))
    rows = load(tmp_path / "net.pt2", OPTIONS).predict(batch)
    with torch.inference_mode():
        np.testing.assert_allclose(rows, module(torch.from_numpy(batch)).numpy(), atol=1e-6)
