"""What an ONNX file says of itself, by its bytes alone."""

import numpy as np
import pytest

from calibration.sets.files import check_file
from models.errors import ModelSetError
from models.runtimes.onnx_file import onnx_facts, read_onnx
from tests.support.runtime_files import float_onnx, tiny_onnx


def test_facts():
    facts = onnx_facts(tiny_onnx(), "net.onnx")
    assert {"Cast", "Softmax", "GlobalAveragePool"} <= facts.operators
    assert facts.external == set()


def test_it_reads_what_the_onnx_package_writes(tmp_path):
    """Tensors inside attributes and inner graphs, and external data, as onnx itself stores them."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    large = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "large")
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["inner_out"], value=large)],
        "inner",
        [],
        [helper.make_tensor_value_info("inner_out", 1, [64, 64])],
    )
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
    assert facts.operators == {"If", "Constant"}
    assert facts.external == {"w.bin"}


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin"])
def test_weights_outside_the_folder_are_not_opened(tmp_path, location):
    (tmp_path / "secret.bin").write_bytes(b"\0" * 12)
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "net.onnx"
    path.write_bytes(float_onnx(external=location))
    with pytest.raises(ModelSetError, match="outside of its folder"):
        check_file(path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "secret.bin").write_bytes(b"\0" * 12)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.bin").symlink_to(tmp_path / "secret.bin")
    path = tmp_path / "sub" / "net.onnx"
    path.write_bytes(float_onnx(external="weights.bin"))
    with pytest.raises(ModelSetError, match="outside of its folder"):
        check_file(path)


def test_weights_that_are_missing(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(float_onnx(external="weights.bin"))
    with pytest.raises(ModelSetError, match=r"keeps weights in weights\.bin, which is missing"):
        check_file(path)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 12)
    check_file(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelSetError, match=r"cannot read .*: No such file"):
        read_onnx(tmp_path / "none.onnx")


def test_graphs_within_graphs_have_a_limit():
    from tests.support.calibration.onnx_file import proto

    graph = b""
    for _ in range(200):
        graph = proto(1, proto(4, "If") + proto(5, proto(6, graph)))
    with pytest.raises(ModelSetError, match="nested more than 32 deep"):
        onnx_facts(proto(7, graph), "deep.onnx")
