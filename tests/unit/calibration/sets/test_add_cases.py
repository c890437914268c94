"""Networks that were once taken for something else: each is right, or refused with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from app.cli.main import app
from calibration.sets.add_set import NewSet, add_set
from calibration.sets.options import MemberOptions
from models.errors import ModelSetError
from models.manifest import MemberRecord
from models.model_set import ModelSet
from models.network import RuntimeOptions, load
from models.record import RuntimeName

SIZE = 16
BOTH: tuple[RuntimeName, ...] = ("openvino", "onnxruntime")
both = pytest.mark.parametrize("runtime", BOTH)
PLAIN = MemberOptions(mean=(0.0,) * 3, scale=(255.0,) * 3)
GAINS = np.linspace(-20, 20, 3 * 40, dtype=np.float32).reshape(3, 40)
Said = list[tuple[str, str, str | None]]


def network(
    path: Path,
    *nodes: Any,
    kind: int = TensorProto.FLOAT,
    num_classes: int = 3,
    weights: dict[str, Any] | None = None,
    opset: int = 21,
) -> Path:
    """Write nodes that follow on each other, from ``x`` [N,3,16,16] to the last one's output."""
    image = helper.make_tensor_value_info("x", kind, ["N", 3, SIZE, SIZE])
    rows = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", num_classes])
    tensors = [numpy_helper.from_array(np.array(v), name) for name, v in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "net", [image], [rows], tensors)
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def step(kind: str, *ends: str, **attributes: Any) -> Any:
    return helper.make_node(kind, list(ends[:-1]), [ends[-1]], **attributes)


def means(source: str = "x") -> tuple[Any, Any]:
    return step("GlobalAveragePool", source, "means"), step("Flatten", "means", "flat")


def added(
    folder: Path,
    path: Path,
    runtime: RuntimeName = "openvino",
    options: MemberOptions = PLAIN,
    *,
    num_classes: int = 3,
    said: Said | None = None,
) -> ModelSet:
    labels = folder / "labels.txt"
    labels.write_text("".join(f"class {n}\n" for n in range(num_classes)), "utf-8")
    new = NewSet("made", [("a", path)], labels, options=options, runtimes={"a": runtime})
    heard = said if said is not None else []
    return add_set(
        new, folder / "sets", is_replaced=True, say=lambda *facts: heard.append(tuple(facts))
    )


def rows_of(made: ModelSet, *colors: tuple[int, int, int], size: int = SIZE) -> np.ndarray:
    """Return the rows of pictures of one colour, RGB."""
    member = made.manifest.members[0]
    model = load(made.network_path("a", next(iter(member.networks))), RuntimeOptions())
    pictures = (
        np.zeros((len(colors), size, size, 3), np.uint8) + np.array(colors, np.uint8)[:, None, None]
    )
    return model.predict(np.ascontiguousarray(pictures[..., ::-1]))


def member_of(made: ModelSet) -> MemberRecord:
    return made.manifest.members[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def exact_and_rounded(folder: Path, kind: str = "Softmax") -> tuple[Path, Path]:
    """Write 40 classes behind a softmax, and the same with its output rounded to 8 bits."""
    weights = {"gains": GAINS, "scale": np.float32(1 / 256), "zero": np.uint8(0)}
    last = () if kind == "Sigmoid" else (("axis", 1),)
    nodes = (*means(), step("MatMul", "flat", "gains", "l"), step(kind, "l", "p", **dict(last)))
    rounding = (
        step("QuantizeLinear", "p", "scale", "zero", "q"),
        step("DequantizeLinear", "q", "scale", "zero", "rounded"),
    )
    return (
        network(folder / "exact.onnx", *nodes, num_classes=40, weights={"gains": GAINS}),
        network(folder / "rounded.onnx", *nodes, *rounding, num_classes=40, weights=weights),
    )


@both
def test_a_softmax_that_is_rounded_gets_no_second_one(tmp_path, runtime):
    """Rounded to 1/256, the rows of 40 classes do not sum to one: the graph says what they are."""
    colors = [(220, 40, 40), (150, 120, 100)]
    wanted = softmax(np.array(colors) / 255 @ GAINS)
    for path in exact_and_rounded(tmp_path):
        made = added(tmp_path, path, runtime, num_classes=40)
        np.testing.assert_allclose(rows_of(made, *colors), wanted, atol=1e-3)


@both
def test_a_sigmoid_that_is_rounded_is_one(tmp_path, runtime):
    for path in exact_and_rounded(tmp_path, "Sigmoid"):
        made = added(tmp_path, path, runtime, num_classes=40)
        assert made.manifest.task == "multi_label"
        wanted = 1 / (1 + np.exp(-np.array([[220, 40, 40]]) / 255 @ GAINS))
        np.testing.assert_allclose(rows_of(made, (220, 40, 40)), wanted, atol=2e-3)


@both
def test_rounded_logits_are_no_probabilities(tmp_path, runtime):
    weights = {"scale": np.float32(0.25), "zero": np.uint8(128)}
    nodes = (
        *means(),
        step("QuantizeLinear", "flat", "scale", "zero", "q"),
        step("DequantizeLinear", "q", "scale", "zero", "l"),
    )
    path = network(tmp_path / "net.onnx", *nodes, weights=weights)
    options = MemberOptions(mean=(0.0,) * 3, scale=(51.0,) * 3)
    made = added(tmp_path, path, runtime, options)
    wanted = softmax(np.array([[4.0, 2.0, 1.0]]))
    np.testing.assert_allclose(rows_of(made, (204, 102, 51), size=SIZE), wanted, atol=1e-2)


def in_training(path: Path) -> Path:
    """Write a batch normalisation by the batch's own mean."""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    weights = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    node = helper.make_node("BatchNormalization", ["x", *weights], ["y", "m", "v"], training_mode=1)
    return network(path, node, *means("y"), weights=weights)


def over_the_batch(path: Path) -> Path:
    return network(path, *means(), step("Softmax", "flat", "p", axis=0))


def less_the_batchs_mean(path: Path) -> Path:
    mean = step("ReduceMean", "flat", "axes", "mean", keepdims=1)
    difference = step("Sub", "flat", "mean", "d")
    gain = step("Mul", "d", "gain", "l")
    weights = {"axes": np.array([0], np.int64), "gain": np.float32(9)}
    return network(path, *means(), mean, difference, gain, weights=weights)


@both
@pytest.mark.parametrize("write", [in_training, over_the_batch, less_the_batchs_mean])
def test_an_answer_that_depends_on_the_batch(
    tmp_path: Path, write: Callable[[Path], Path], runtime: RuntimeName
) -> None:
    says = r"net\.onnx.* depends on the other images of its batch|over another dimension than the"
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, write(tmp_path / "net.onnx"), runtime)
    assert not (tmp_path / "sets").exists()


@both
@pytest.mark.parametrize("kind", ["INT32", "INT64", "UINT16", "UINT8"])
def test_integers_are_pixels(tmp_path, kind, runtime):
    """Neither mean nor scale is theirs; of uint8, which may be folded already, BGR is assumed."""
    taken = getattr(TensorProto, kind)
    cast, gain = step("Cast", "x", "f", to=TensorProto.FLOAT), step("Mul", "flat", "gain", "l")
    weights = {"gain": np.float32(0.1)}
    path = network(tmp_path / "net.onnx", cast, *means("f"), gain, kind=taken, weights=weights)
    options = MemberOptions(color_order="RGB" if kind == "UINT8" else None)
    said: Said = []
    made = added(tmp_path, path, runtime, options, said=said)
    wanted = softmax(np.array([[15.0, 12.0, 10.0]]))
    np.testing.assert_allclose(rows_of(made, (150, 120, 100)), wanted, atol=1e-3)
    assert said[0][1].startswith("takes RGB pixels as they are; gives logits, to which a softmax")


def dynamic(path: Path) -> Path:
    """Write a product in INT8 whose range is found out for each batch."""
    whole = np.clip(np.round(GAINS[:, :3] * 6), -127, 127).astype(np.int8)
    nodes = (
        *means(),
        helper.make_node("DynamicQuantizeLinear", ["flat"], ["q", "scale", "zero"]),
        step("MatMulInteger", "q", "whole", "zero", "product"),
        step("Cast", "product", "floats", to=TensorProto.FLOAT),
        step("Mul", "floats", "scale", "scaled"),
        step("Mul", "scaled", "of_weights", "l"),
    )
    weights = {"whole": whole, "of_weights": np.float32(1 / 60)}
    return network(path, *nodes, weights=weights)


@both
def test_what_is_quantised_while_it_runs_is_int8(tmp_path, runtime):
    made = added(tmp_path, dynamic(tmp_path / "net.onnx"), runtime)
    assert tuple(member_of(made).networks) == ("INT8",)
    assert member_of(made).imported_int8


def sixteen_bits(path: Path) -> Path:
    weights = {"scale": np.float32(1e-4), "zero": np.uint16(0)}
    nodes = (
        step("QuantizeLinear", "x", "scale", "zero", "q"),
        step("DequantizeLinear", "q", "scale", "zero", "y"),
    )
    return network(path, *nodes, *means("y"), weights=weights)


def test_sixteen_bits_are_left_to_onnx_runtime(tmp_path):
    path = sixteen_bits(tmp_path / "net.onnx")
    with pytest.raises(ModelSetError, match=r"16 bits, which OpenVINO .*=onnxruntime"):
        added(tmp_path, path)
    made = added(tmp_path, path, "onnxruntime")
    wanted = softmax(np.array([[220, 40, 40]]) / 255)
    np.testing.assert_allclose(rows_of(made, (220, 40, 40)), wanted, atol=1e-3)


def test_numbers_that_are_none_do_not_damn_the_weights(tmp_path):
    logarithm = step("Log", "x", "y")  # of 0 - 1
    path = network(tmp_path / "net.onnx", logarithm, *means("y"))
    with pytest.raises(
        ModelSetError, match="answers NaN to an image, and no weight is NaN"
    ) as told:
        added(tmp_path, path, options=MemberOptions(mean=(999.0,) * 3))
    assert "damaged" not in told.value.message


@both
def test_units_of_0_to_1_are_doubted_and_what_is_taken_is_said(tmp_path, runtime):
    path = network(tmp_path / "net.onnx", *means())
    said: Said = []
    units = MemberOptions(mean=(0.485, 0.456, 0.406), scale=(0.229, 0.224, 0.225))
    added(tmp_path, path, runtime, units, said=said)
    added(tmp_path, path, runtime, MemberOptions(resize_shorter=20), said=said)
    added(tmp_path, path, runtime, MemberOptions(mean=(0.0,) * 3, scale=(1.0,) * 3), said=said)
    (_, _, doubt), (name, facts, none), (_, _, raw) = said
    assert doubt is not None
    assert "look like those of pixels from 0 to 1" in doubt
    assert "--mean 123.675,116.28,103.53 --scale 58.395,57.12,57.375" in doubt
    assert (none, raw) == (None, None)
    assert (name, facts) == (
        "a",
        "takes (RGB - 123.675,116.28,103.53) / 58.395,57.12,57.375; gives logits, to which a "
        "softmax was added; pictures resized to 20 px and cropped to 16, bilinear",
    )


def test_where_the_runtimes_differ_it_is_said(tmp_path):
    """OpenVINO pools what a rounded-up size adds otherwise."""
    pool = step(
        "AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
        ceil_mode=1, count_include_pad=1,
    )  # fmt: skip
    gain = step("Mul", "flat", "gain", "l")
    weights = {"gain": np.array([4, -4, 0], np.float32)}
    said: Said = []
    added(tmp_path, network(tmp_path / "a.onnx", *means(), gain, weights=weights), said=said)
    added(
        tmp_path, network(tmp_path / "b.onnx", pool, *means("y"), gain, weights=weights), said=said
    )
    (_, _, none), (_, _, doubt) = said
    assert none is None
    assert doubt is not None
    assert "OpenVINO and ONNX Runtime differ by 0." in doubt


def test_what_only_openvino_takes_is_not_compared_and_that_is_said(tmp_path: Path) -> None:
    """A fuzz made a shape that is a lie, and a scale of which OpenVINO makes another class."""
    path = network(tmp_path / "a.onnx", *means())
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2**63 - 1
    onnx.save(model, path)
    said: Said = []
    added(tmp_path, path, said=said)
    ((_, _, doubt),) = said
    assert doubt is not None
    assert "not compared with ONNX Runtime's" in doubt
    assert "says that it gives 9223372036854775807 classes, but computes 3" in doubt


@both
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git lfs pull"),
        (b"\n <!DOCTYPE html>\n<html><body>Sign in</body></html>", r"is a web page \(HTML\)"),
        (b"", "is empty: download it, or export it again"),
    ],
    ids=["git lfs", "html", "empty"],
)
def test_what_a_download_left_instead(tmp_path, capfd, content, says, runtime):
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, tmp_path / "net.onnx", runtime)
    assert capfd.readouterr() == ("", "")


@both
def test_a_list_of_dictionaries(tmp_path, runtime):
    zip_map = helper.make_node(
        "ZipMap", ["flat"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
    )
    path = network(tmp_path / "net.onnx", *means(), zip_map)
    with pytest.raises(ModelSetError, match=r"a list of dictionaries \(ZipMap"):
        added(tmp_path, path, runtime)


def behind_slopes(path: Path) -> Path:
    """Write slopes of their own for what is negative, channel by channel."""
    slopes = np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
    nodes = step("PRelu", "x", "slopes", "s"), step("Conv", "s", "w", "y")
    return network(path, *nodes, *means("y"), weights={"slopes": slopes, "w": IDENTITY})


def behind_a_fourth_channel(path: Path) -> Path:
    """Write a padding of one channel in front, of ones, that counts for nothing."""
    ends = np.array([0, 1, 0, 0, 0, 0, 0, 0])
    nodes = step("Pad", "x", "ends", "one", "p"), step("Conv", "p", "w", "y")
    weights = {"ends": ends, "one": np.float32(1), "w": np.pad(IDENTITY, [(0, 0), (1, 0), *NONE])}
    return network(path, *nodes, *means("y"), weights=weights)


IDENTITY = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
NONE = ((0, 0), (0, 0))


@both
@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize(
    ("write", "gains"),
    [(behind_slopes, np.array([1, 2, 3])), (behind_a_fourth_channel, np.ones(3))],
    ids=["slopes", "a fourth channel"],
)
def test_colours_keep_what_is_theirs(tmp_path, write, gains, order, runtime):
    """OpenVINO changes their order in the convolution's weights, past what is in between."""
    options = MemberOptions(color_order=order, mean=(255.0,) * 3, scale=(51.0,) * 3)
    made = added(tmp_path, write(tmp_path / "net.onnx"), runtime, options)
    colors = [(220, 40, 90), (30, 120, 100)]
    taken = np.array(colors)[:, :: 1 if order == "RGB" else -1]
    wanted = softmax((taken - 255) / 51 * gains)
    np.testing.assert_allclose(rows_of(made, *colors), wanted, atol=2e-3)


def test_concatenations_of_the_same_along_other_axes(tmp_path):
    """The longer one is no extension of the shorter one."""
    wide, deep = step("Concat", "x", "x", "x", "a", axis=3), step("Concat", "x", "x", "b", axis=1)
    tall = step("Conv", "b", "w", "c")
    sums = (
        step("GlobalAveragePool", "c", "d"),
        step("Flatten", "d", "e"),
        step("Add", "flat", "e", "l"),
    )
    weights = {"w": np.concatenate([IDENTITY, 8 * IDENTITY], axis=1)}
    path = network(tmp_path / "net.onnx", deep, wide, tall, *means("a"), *sums, weights=weights)
    wanted = softmax(np.array([[220, 40, 40]]) / 255 * 10)
    np.testing.assert_allclose(rows_of(added(tmp_path, path), (220, 40, 40)), wanted, atol=2e-3)


@both
def test_an_operator_that_the_runtime_lacks_is_named(tmp_path, capfd, runtime):
    path = network(tmp_path / "net.onnx", step("Foo", "x", "y"), *means("y"))
    with pytest.raises(ModelSetError, match=r"net\.onnx.* Foo") as told:
        added(tmp_path, path, runtime)
    assert str(path) in told.value.message
    assert capfd.readouterr() == ("", "")


@both
def test_what_fails_while_it_runs_is_told_in_a_line(tmp_path, capfd, runtime):
    """The number of images is one, by a constant beside them."""
    one = np.ones((1, 1, SIZE, SIZE), np.float32)
    nodes = step("Concat", "x", "one", "y", axis=1), step("Conv", "y", "w", "z")
    weights = {"one": one, "w": np.ones((3, 4, 1, 1), np.float32)}
    path = network(tmp_path / "net.onnx", *nodes, *means("z"), weights=weights)
    with pytest.raises(ModelSetError, match=r"net\.onnx") as told:
        added(tmp_path, path, runtime)
    assert str(path) in told.value.message
    assert capfd.readouterr() == ("", "")


@both
def test_the_assumed_order_of_uint8_pixels_is_doubted(tmp_path, runtime):
    cast = step("Cast", "x", "f", to=TensorProto.FLOAT)
    path = network(tmp_path / "net.onnx", cast, *means("f"), kind=TensorProto.UINT8)
    said: Said = []
    made = added(tmp_path, path, runtime, MemberOptions(), said=said)
    own = made.network_path("a", "FP16")
    (tmp_path / "kept").mkdir()
    for file in own.parent.glob(f"{own.stem}.*"):
        file.rename(tmp_path / "kept" / file.name)
    added(tmp_path, tmp_path / "kept" / own.name, runtime, MemberOptions(), said=said)
    added(tmp_path, path, runtime, MemberOptions(color_order="BGR"), said=said)
    (_, facts, doubt), (_, _, of_its_own), (_, _, stated) = said
    assert facts.startswith("takes BGR pixels as they are")
    assert "if it was made for RGB, say --color-order RGB" in str(doubt)
    assert (of_its_own, stated) == (None, None)


def test_a_file_that_its_reader_dies_of_is_an_error_of_a_line(tmp_path):
    """OpenVINO 2026.4 ends with a segmentation fault here; the command does not."""
    path = network(tmp_path / "net.onnx", step("Conv", "x", "y"), *means("y"))
    (tmp_path / "labels.txt").write_text("a\nb\nc\n", "utf-8")
    words = ["models", "add", "made", "--member", f"a={path}", "--into", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--labels", str(tmp_path / "labels.txt")])
    assert isinstance(result.exception, ModelSetError)
    assert str(path) in result.exception.message
    assert "\n" not in result.exception.message
    assert not (tmp_path / "made").exists()


def test_what_the_manifest_refuses_is_an_error_of_a_line(tmp_path):
    path = network(tmp_path / "net.onnx", *means("x"))
    (tmp_path / "labels.txt").write_text("a\nb\nc\n", "utf-8")
    words = ["models", "add", "made", "--member", f"../a={path}", "--into", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--labels", str(tmp_path / "labels.txt")])
    assert isinstance(result.exception, ModelSetError)
    assert "name: String should match pattern" in result.exception.message
    assert "\n" not in result.exception.message
