"""ONNX Runtime: rows, batches, threads, refusals, and what a file says by its bytes alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration.sets.files import check_file
from models.errors import ModelSetError
from models.network import RuntimeOptions, load
from models.onnx_runtime import OnnxNetwork, onnx_facts, read_onnx
from tests.support.calibration.onnx_file import proto
from tests.support.cases import cases
from tests.support.runtime_files import float_onnx, tiny_onnx
from tests.support.tiny_networks import SIZE

OPTIONS = RuntimeOptions(batch_sizes=(1, 4))


def images(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def expected(batch: np.ndarray, gain: float = 4.0) -> np.ndarray:
    exponentials = np.exp(gain * batch.mean((1, 2)) / 255)
    return exponentials / exponentials.sum(1, keepdims=True)


def network(tmp_path, content: bytes, options: RuntimeOptions = OPTIONS) -> OnnxNetwork:
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    return OnnxNetwork(path, options)


@pytest.mark.parametrize("batch", ["N", 1, 3], ids=["any batch", "batch 1", "batch 3"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_of_any_size_gives_its_own_rows(tmp_path, batch, count):
    made = network(tmp_path, tiny_onnx(batch=batch))
    rows = made.predict(images(count))
    assert (rows.dtype, rows.shape) == (np.float32, (count, 3))
    np.testing.assert_allclose(rows, expected(images(count)), atol=1e-5)
    np.testing.assert_array_equal(made.predict(list(images(count))), rows)
    assert (made.fixed_batch, made.batch_sizes) == (
        (None, (1, 4)) if batch == "N" else (batch, (batch,))
    )


def test_what_the_network_says_of_itself(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(tiny_onnx())
    made = load(path, RuntimeOptions(num_threads=2, num_streams=2, batch_sizes=(4, 1)))
    assert (made.runtime, made.num_threads, made.batch_sizes) == ("onnxruntime", 2, (1, 4))
    assert (made.input_shape, made.num_classes) == ((SIZE, SIZE, 3), 3)
    assert made.version.count(".") == 2
    assert (made.float_type, made.kernels, made.max_batch_size) == ("f32", (), 4)
    assert made.memory_bytes >= 0
    made.warm_up()
    made.check_fits(SIZE, 3)
    with pytest.raises(ModelSetError, match="mend the manifest"):
        made.check_fits(SIZE, 4)


def test_batches_out_of_range_and_images_of_another_kind(tmp_path):
    made = network(tmp_path, tiny_onnx())
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"a batch of {count} images; 1 to 4"):
            made.predict(images(5)[:count])
    with pytest.raises(ValueError, match="takes uint8, 0 to 255"):
        made.predict(images(1).astype(np.float32))
    with pytest.raises(ValueError, match=r"an image of \(8, 16, 3\)"):
        made.predict(images(1)[:, :8])


def test_threads_may_run_it_at_the_same_time(tmp_path):
    made = network(tmp_path, tiny_onnx(), RuntimeOptions(num_threads=2, num_streams=2))
    batches = [images(8)[i : i + 4] for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        runs = threads.map(lambda batch: [made.predict(batch) for _ in range(20)], batches)
        for batch, answers in zip(batches, runs, strict=True):
            for rows in answers:
                np.testing.assert_allclose(rows, expected(batch), atol=1e-5)


@cases(
    "content, says",
    (b"", "is no ONNX file"),
    (b"not an ONNX file at all", "is no ONNX file, or was cut short"),
    (tiny_onnx()[:-20], "was cut short"),
    (tiny_onnx(opset=99), "ONNX Runtime .* cannot load .*[Oo]pset 99"),
    (tiny_onnx(operator="NoSuch"), "ONNX Runtime .* cannot load .*NoSuch"),
    (tiny_onnx(external="weights.bin"), "weights in other files .*'weights.bin'.*models add"),
    (tiny_onnx(external="../../etc/passwd"), "weights in other files"),
    (tiny_onnx(num_outputs=2), "1 inputs and 2 outputs; a member has one of each"),
    (float_onnx(), "models add folds the preprocessing in"),
    ids=["empty", "text", "cut", "opset", "operator", "external", "outside", "2 out", "float"],
)
def test_a_file_that_is_no_member(tmp_path, content, says):
    with pytest.raises(ModelSetError, match=says):
        network(tmp_path, content)


def test_a_network_that_fails_on_images(tmp_path):
    """Its output is declared for any batch, but a reshape has a number built in."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["floats"], ["means"], axes=[1, 2], keepdims=0),
            helper.make_node("Reshape", ["means", "shape"], ["rows"]),
        ],
        "odd",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["N", SIZE, SIZE, 3])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.array([1, 3]), "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    made = network(tmp_path, model.SerializeToString())
    made.predict(images(1))
    with pytest.raises(ModelSetError, match=r"Runtime cannot run .* on 2 images: .*[Rr]eshape"):
        made.predict(images(2))


def test_it_reads_what_the_onnx_package_writes(tmp_path):
    """Tensors inside attributes and inner graphs, and external data, as onnx itself stores them."""
    facts = onnx_facts(tiny_onnx(), "net.onnx")
    assert {"Cast", "Softmax", "GlobalAveragePool"} <= facts.operators
    assert facts.external == set()
    large = numpy_helper.from_array(np.zeros((64, 64), np.float32), "large")
    inner_out = helper.make_tensor_value_info("inner_out", 1, [64, 64])
    constant = helper.make_node("Constant", [], ["inner_out"], value=large)
    inner = helper.make_graph([constant], "inner", [], [inner_out])
    graph = helper.make_graph(
        [helper.make_node("If", ["yes"], ["out"], then_branch=inner, else_branch=inner)],
        "outer",
        [helper.make_tensor_value_info("yes", 9, [])],
        [helper.make_tensor_value_info("out", 1, [64, 64])],
    )
    model = helper.make_model(graph)
    onnx.external_data_helper.convert_model_to_external_data(
        model, location="w.bin", size_threshold=0, convert_attribute=True
    )
    onnx.save(model, tmp_path / "net.onnx")
    check_file(tmp_path / "net.onnx")
    facts = onnx_facts((tmp_path / "net.onnx").read_bytes(), "net.onnx")
    assert (facts.operators, facts.external) == ({"If", "Constant"}, {"w.bin"})


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link"])
def test_weights_outside_the_folder_are_not_opened_and_no_link_is_followed(tmp_path, location):
    (tmp_path / "secret.bin").write_bytes(b"\0" * 12)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link").symlink_to(tmp_path / "secret.bin")
    path = tmp_path / "sub" / "net.onnx"
    path.write_bytes(float_onnx(external=location))
    with pytest.raises(ModelSetError, match="outside of its folder"):
        check_file(path)


def test_weights_that_are_missing(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(float_onnx(external="weights.bin"))
    with pytest.raises(ModelSetError, match=r"keeps weights in weights\.bin, which is missing"):
        check_file(path)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 12)
    check_file(path)


def test_graphs_within_graphs_have_a_limit_and_a_file_must_be_there(tmp_path):
    graph = b""
    for _ in range(200):
        graph = proto(1, proto(4, "If") + proto(5, proto(6, graph)))
    with pytest.raises(ModelSetError, match="nested more than 32 deep"):
        onnx_facts(proto(7, graph), "deep.onnx")
    with pytest.raises(ModelSetError, match=r"cannot read .*: No such file"):
        read_onnx(tmp_path / "none.onnx")
