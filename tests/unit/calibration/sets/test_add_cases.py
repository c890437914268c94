"""Networks that were once taken for something else: each is right, or refused with the reason."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration.sets.add_set import NewSet, add_set_apart
from calibration.sets.options import MemberOptions
from models.errors import ModelSetError
from tests.support.calibration import added_sets
from tests.support.calibration.added_sets import both, content, sigmoid, softmax, text
from tests.support.cases import cases
from tests.support.command_line import tandem

SIZE = 16
WITHOUT = MemberOptions(mean=(0.0,) * 3, scale=(1.0,) * 3)
PLAIN = MemberOptions(mean=(0.0,) * 3, scale=(255.0,) * 3)
LOGITS = PLAIN.model_copy(update={"outputs": "logits"})
GAINS = np.linspace(-20, 20, 3 * 40, dtype=np.float32).reshape(3, 40)
NUM_CLASSES = 40
close = partial(np.testing.assert_allclose, atol=1e-3)
Said = list[tuple[str, str, str | None]]
IDENTITY = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)


def network(path: Path, *nodes: Any, kind: Any = TensorProto.FLOAT, **weights: Any) -> Path:
    """Write nodes that follow on each other, from ``x`` [N,3,16,16] to the last one's output."""
    image = helper.make_tensor_value_info("x", kind, ["N", 3, SIZE, SIZE])
    classes = NUM_CLASSES if "gains" in weights else 3
    rows = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", classes])
    tensors = [numpy_helper.from_array(np.array(v), name) for name, v in weights.items()]
    graph = helper.make_graph(list(nodes), "net", [image], [rows], tensors)
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def step(kind: str, *ends: str, **attributes: Any) -> Any:
    return helper.make_node(kind, list(ends[:-1]), [ends[-1]], **attributes)


def means(source: str = "x") -> tuple[Any, Any]:
    return step("GlobalAveragePool", source, "means"), step("Flatten", "means", "flat")


def rounding(source: str, result: str) -> tuple[Any, Any]:
    """Return steps that quantise by the weights ``scale`` and ``zero``, and back."""
    return (
        step("QuantizeLinear", source, "scale", "zero", "q"),
        step("DequantizeLinear", "q", "scale", "zero", result),
    )


def added(folder, path, runtime=None, options=PLAIN, *, num_classes=3, said=None):
    heard = [] if said is None else said
    return added_sets.added(
        folder,
        path,
        runtime=runtime,
        options=options,
        labels=[f"class {number}" for number in range(num_classes)],
        say=lambda *facts: heard.append(facts),
    )


def refused(says: str, folder: Path, path: Path, runtime: Any = None) -> None:
    assert str(path) in added_sets.refused(says, folder, path, runtime=runtime, options=PLAIN)


def rows_of(made, *colors):
    """Return the rows of pictures of one colour, RGB."""
    pictures = (
        np.zeros((len(colors), SIZE, SIZE, 3), np.uint8) + np.array(colors, np.uint8)[:, None, None]
    )
    return added_sets.rows_of(made, np.ascontiguousarray(pictures[..., ::-1]))


@both
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("kind", ["Softmax", "Sigmoid"])
def test_an_ending_that_is_rounded_gets_no_second_one(tmp_path, runtime, kind, is_rounded):
    """Rounded to 1/256, the rows of 40 classes do not sum to one: the graph says what they are."""
    axis = {"axis": 1} if kind == "Softmax" else {}
    nodes = [*means(), step("MatMul", "flat", "gains", "l"), step(kind, "l", "p", **axis)]
    weights: dict[str, Any] = {"gains": GAINS}
    if is_rounded:
        nodes += rounding("p", "rounded")
        weights |= {"scale": np.float32(1 / 256), "zero": np.uint8(0)}
    made = added(
        tmp_path, network(tmp_path / "net.onnx", *nodes, **weights), runtime, num_classes=40
    )
    assert made.manifest.task == {"Softmax": "classification", "Sigmoid": "multi_label"}[kind]
    colors = [(220, 40, 40), (150, 120, 100)]
    ending, atol = (softmax, 1e-3) if kind == "Softmax" else (sigmoid, 2e-3)
    close(rows_of(made, *colors), ending(np.array(colors) / 255 @ GAINS), atol=atol)


@both
def test_rounded_logits_are_no_probabilities(tmp_path, runtime):
    weights = {"scale": np.float32(0.25), "zero": np.uint8(128)}
    path = network(tmp_path / "net.onnx", *means(), *rounding("flat", "l"), **weights)
    made = added(tmp_path, path, runtime, MemberOptions(mean=(0.0,) * 3, scale=(51.0,) * 3))
    close(rows_of(made, (204, 102, 51)), softmax(np.array([[4.0, 2.0, 1.0]])), atol=1e-2)


def one_number(path: Path, *ends: Any, sides: int = 2, **weights: Any) -> Path:
    """Write a network with one number an image: red less green, times 8, and these steps."""
    weights |= {"column": np.array([[8], [-8], [0]], np.float32)}
    number = step("MatMul", "flat", "column", "z")
    network(path, *means(), number, *ends, **weights)
    model = onnx.load(path)
    dimensions = model.graph.output[0].type.tensor_type.shape.dim
    del dimensions[1:]
    if sides == 2:
        dimensions.add().dim_value = 1
    onnx.save(model, path)
    return path


@both
@pytest.mark.parametrize("end", ["sigmoid", "flat sigmoid", "logit", "logits asked", "hard"])
def test_one_number_is_a_classifier_of_two_classes(tmp_path, runtime, end):
    ends: tuple[Any, ...] = (step("Sigmoid", "z", "p"),)
    options, sides = PLAIN, 2
    if end == "flat sigmoid":  # (N)
        ends, sides = (*ends, step("Squeeze", "p", "axis", "rows")), 1
    elif end == "hard":
        ends = (step("HardSigmoid", "z", "p"),)
    elif "logit" in end:
        ends, options = (), LOGITS if end == "logits asked" else PLAIN
    weights: dict[str, Any] = {"axis": np.array([1], np.int64)} if sides == 1 else {}
    path = one_number(tmp_path / "net.onnx", *ends, sides=sides, **weights)
    said: Said = []
    made = added(tmp_path, path, runtime, options, num_classes=2, said=said)
    assert (made.manifest.task, made.manifest.num_classes) == ("classification", 2)
    assert ", the second label's; the first has the rest" in said[0][1]
    colors = np.array([(204, 102, 51), (0, 51, 255), (100, 100, 0)])
    z = (colors[:, :1] - colors[:, 1:2]) * 8 / 255
    p = np.clip(0.2 * z + 0.5, 0, 1) if end == "hard" else sigmoid(z)
    close(rows_of(made, *colors.tolist()), np.hstack([1 - p, p]))


@both
@cases(
    "ends, says",
    ((step("Sigmoid", "z", "p"), step("Mul", "p", "hundred", "rows")), "no softmax ends it"),
    ((step("Softmax", "z", "p", axis=1),), "one number an image, a softmax of which is always 1"),
    ((step("Clip", "z", "zero", "one", "p"),), "no softmax ends it: these may be scores"),
)
def test_one_number_in_other_units_is_refused(tmp_path, runtime, ends, says):
    weights: dict[str, Any] = {"hundred": np.float32(100)}
    weights |= {"zero": np.float32(0), "one": np.float32(1)}
    path = one_number(tmp_path / "net.onnx", *ends, **weights)
    refused(says, tmp_path, path, runtime)
    with pytest.raises(ModelSetError, match="which is two classes"):
        added_sets.added(tmp_path, one_number(tmp_path / "z.onnx"), runtime=runtime,
                         options=PLAIN, task="multi_label")  # fmt: skip


@both
@cases(
    "ends",
    (step("HardSigmoid", "l", "p"),),
    (step("Softmax", "l", "s", axis=1), step("Mul", "s", "hundred", "p")),
    (step("Sigmoid", "l", "s"), step("Mul", "hundred", "s", "p")),
    (step("Clip", "l", "zero", "one", "p"),),
)
def test_scores_and_shares_are_no_logits(tmp_path, runtime, ends):
    """A softmax behind per cent made 0.57 of each 1, and another class of close ones."""
    of_three = GAINS[:, ::20] * np.array([[1], [-1], [1]], np.float32) / 20
    weights = {"gain": np.hstack([of_three, of_three[:, :1]]), "hundred": np.float32(100)}
    weights |= {"zero": np.float32(0), "one": np.float32(1)}
    nodes = (*means(), step("MatMul", "flat", "gain", "l"), *ends)
    path = network(tmp_path / "net.onnx", *nodes, **weights)
    refused("and no softmax ends it: these may be scores", tmp_path, path, runtime)
    added(tmp_path, path, runtime, LOGITS)  # who says it gets it


def in_training(path: Path) -> Path:
    """Write a batch normalisation by the batch's own mean."""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    weights = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
    node = helper.make_node("BatchNormalization", ["x", *weights], ["y", "m", "v"], training_mode=1)
    return network(path, node, *means("y"), **weights)


def over_the_batch(path: Path) -> Path:
    return network(path, *means(), step("Softmax", "flat", "p", axis=0))


def less_the_batchs_mean(path: Path) -> Path:
    mean = step("ReduceMean", "flat", "axes", "mean", keepdims=1)
    difference = step("Sub", "flat", "mean", "d")
    gain = step("Mul", "d", "gain", "l")
    weights = {"axes": np.array([0], np.int64), "gain": np.float32(9)}
    return network(path, *means(), mean, difference, gain, **weights)


@both
@pytest.mark.parametrize("write", [in_training, over_the_batch, less_the_batchs_mean])
def test_an_answer_that_depends_on_the_batch(tmp_path, write, runtime):
    says = r"net\.onnx.* depends on the other images of its batch|over another dimension than the"
    refused(says, tmp_path, write(tmp_path / "net.onnx"), runtime)


@both
@pytest.mark.parametrize("kind", ["INT32", "INT64", "UINT16", "UINT8"])
def test_integers_are_pixels(tmp_path, kind, runtime):
    """Neither mean nor scale is theirs; of uint8, which may be folded already, BGR is assumed."""
    taken = getattr(TensorProto, kind)
    cast, gain = step("Cast", "x", "f", to=TensorProto.FLOAT), step("Mul", "flat", "gain", "l")
    nodes = (cast, *means("f"), gain)
    path = network(tmp_path / "net.onnx", *nodes, kind=taken, gain=np.float32(0.1))
    options = MemberOptions(color_order="RGB" if kind == "UINT8" else None)
    said: Said = []
    made = added(tmp_path, path, runtime, options, said=said)
    close(rows_of(made, (150, 120, 100)), softmax(np.array([[15.0, 12.0, 10.0]])))
    assert said[0][1].startswith("takes RGB pixels as they are; gives logits, to which a softmax")


@both
def test_what_is_quantised_while_it_runs_is_int8(tmp_path, runtime):
    """A product in INT8 whose range is computed for each batch."""
    nodes = (
        *means(),
        helper.make_node("DynamicQuantizeLinear", ["flat"], ["q", "scale", "zero"]),
        step("MatMulInteger", "q", "whole", "zero", "product"),
        step("Cast", "product", "floats", to=TensorProto.FLOAT),
        step("Mul", "floats", "scale", "scaled"),
        step("Mul", "scaled", "of_weights", "l"),
    )
    whole = np.clip(np.round(GAINS[:, :3] * 6), -127, 127).astype(np.int8)
    path = network(tmp_path / "net.onnx", *nodes, whole=whole, of_weights=np.float32(1 / 60))
    (member,) = added(tmp_path, path, runtime).manifest.members
    assert (tuple(member.networks), member.imported_int8) == (("INT8",), True)


def test_sixteen_bits_are_left_to_onnx_runtime(tmp_path):
    weights = {"scale": np.float32(1e-4), "zero": np.uint16(0)}
    path = network(tmp_path / "net.onnx", *rounding("x", "y"), *means("y"), **weights)
    refused(r"16 bits, which OpenVINO .*=onnxruntime", tmp_path, path)
    made = added(tmp_path, path, "onnxruntime", LOGITS)
    close(rows_of(made, (220, 40, 40)), softmax(np.array([[220, 40, 40]]) / 255))


def test_numbers_that_are_none_do_not_damn_the_weights(tmp_path):
    path = network(tmp_path / "net.onnx", step("Log", "x", "y"), *means("y"))  # of 0 - 1
    says = "^(?!.*damaged).*answers NaN to an image, and no weight is NaN"
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, path, options=MemberOptions(mean=(999.0,) * 3))


@both
def test_units_of_0_to_1_are_doubted_and_what_is_taken_is_said(tmp_path, runtime):
    path = network(tmp_path / "net.onnx", *means())
    said: Said = []
    units = MemberOptions(mean=(0.485, 0.456, 0.406), scale=(0.229, 0.224, 0.225))
    for options in (units, MemberOptions(resize_shorter=20), WITHOUT):
        added(tmp_path, path, runtime, options, said=said)
    (_, _, doubt), (name, facts, none), (_, _, raw) = said
    assert doubt is not None
    assert "look like those of pixels from 0 to 1" in doubt
    assert "--mean 123.675,116.28,103.53 --scale 58.395,57.12,57.375" in doubt
    assert (none, raw) == (None, None)
    assert (name, facts) == (
        "m0",
        "takes (RGB - 123.675,116.28,103.53) / 58.395,57.12,57.375; gives logits, to which a "
        "softmax was added; pictures resized to 20 px and cropped to 16, bilinear",
    )


def test_where_the_runtimes_differ_it_is_said(tmp_path):
    """OpenVINO pools what a rounded-up size adds otherwise."""
    pool = step(
        "AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
        ceil_mode=1, count_include_pad=1,
    )  # fmt: skip
    nodes = means(), (pool, *means("y"))
    gain, weights, said = step("Mul", "flat", "gain", "l"), np.array([4, -4, 0], np.float32), Said()
    for before in nodes:
        added(tmp_path, network(tmp_path / "net.onnx", *before, gain, gain=weights), said=said)
    (_, _, none), (_, _, doubt) = said
    assert none is None
    assert doubt is not None
    assert "OpenVINO and ONNX Runtime differ by 0." in doubt


def test_what_only_openvino_takes_is_not_compared_and_that_is_said(tmp_path):
    """A fuzz made a shape that is a lie, and a scale of which OpenVINO makes another class."""
    path = network(tmp_path / "a.onnx", *means())
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2**63 - 1
    onnx.save(model, path)
    said: Said = []
    added(tmp_path, path, options=LOGITS, said=said)
    ((_, _, doubt),) = said
    assert doubt is not None
    assert "not compared with ONNX Runtime's" in doubt
    assert "says that it gives 9223372036854775807 classes, but computes 3" in doubt


def test_readers_of_other_formats_print_nothing(tmp_path, capfd):
    """OpenVINO tries TensorFlow's, which printed five lines in front of the refusal."""
    path = content(tmp_path / "net.tflite", b"\x1c\0\0\0TFL3" + bytes(range(256)))
    new = NewSet("s", [("a", path)], text(tmp_path / "labels.txt", "a", "b"))
    with pytest.raises(ModelSetError, match=r"OpenVINO cannot read .*net\.tflite"):
        add_set_apart(new, tmp_path / "sets", is_replaced=False, say=lambda *_: None)
    assert capfd.readouterr() == ("", "")


@both
@cases(
    "data, says",
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git lfs pull"),
    (b"\n <!DOCTYPE html>\n<html><body>Sign in</body></html>", r"is a web page \(HTML\)"),
    (b"", "is empty: download it, or export it again"),
    ids=["git lfs", "html", "empty"],
)
def test_what_a_download_left_instead(tmp_path, capfd, data, says, runtime):
    refused(says, tmp_path, content(tmp_path / "net.onnx", data), runtime)
    assert capfd.readouterr() == ("", "")


@both
def test_a_list_of_dictionaries(tmp_path, runtime):
    zip_map = helper.make_node(
        "ZipMap", ["flat"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
    )
    path = network(tmp_path / "net.onnx", *means(), zip_map)
    refused(r"a list of dictionaries \(ZipMap", tmp_path, path, runtime)


def behind_slopes(path: Path) -> Path:
    """Write slopes of their own for what is negative, channel by channel."""
    slopes = np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
    nodes = step("PRelu", "x", "slopes", "s"), step("Conv", "s", "w", "y")
    return network(path, *nodes, *means("y"), slopes=slopes, w=IDENTITY)


def behind_a_fourth_channel(path: Path) -> Path:
    """Write a padding of one channel in front, of ones, that counts for nothing."""
    ends = np.array([0, 1, 0, 0, 0, 0, 0, 0])
    nodes = step("Pad", "x", "ends", "one", "p"), step("Conv", "p", "w", "y")
    wide = np.pad(IDENTITY, [(0, 0), (1, 0), (0, 0), (0, 0)])
    return network(path, *nodes, *means("y"), ends=ends, one=np.float32(1), w=wide)


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
    close(rows_of(made, *colors), softmax((taken - 255) / 51 * gains), atol=2e-3)


def test_concatenations_of_the_same_along_other_axes(tmp_path):
    """The longer one is no extension of the shorter one."""
    wide, deep = step("Concat", "x", "x", "x", "a", axis=3), step("Concat", "x", "x", "b", axis=1)
    tall = step("Conv", "b", "w", "c")
    sums = step("GlobalAveragePool", "c", "d"), step("Flatten", "d", "e")
    nodes = (deep, wide, tall, *means("a"), *sums, step("Add", "flat", "e", "l"))
    weights = np.concatenate([IDENTITY, 8 * IDENTITY], axis=1)
    path = network(tmp_path / "net.onnx", *nodes, w=weights)
    wanted = softmax(np.array([[220, 40, 40]]) / 255 * 10)
    close(rows_of(added(tmp_path, path), (220, 40, 40)), wanted, atol=2e-3)


@both
def test_an_operator_that_the_runtime_lacks_is_named(tmp_path, capfd, runtime):
    path = network(tmp_path / "net.onnx", step("Foo", "x", "y"), *means("y"))
    refused(r"net\.onnx.* Foo", tmp_path, path, runtime)
    assert capfd.readouterr() == ("", "")


@both
def test_what_fails_while_it_runs_is_told_in_a_line(tmp_path, capfd, runtime):
    """The number of images is one, by a constant beside them."""
    one = np.ones((1, 1, SIZE, SIZE), np.float32)
    nodes = step("Concat", "x", "one", "y", axis=1), step("Conv", "y", "w", "z")
    weights = {"one": one, "w": np.ones((3, 4, 1, 1), np.float32)}
    path = network(tmp_path / "net.onnx", *nodes, *means("z"), **weights)
    refused(r"net\.onnx", tmp_path, path, runtime)
    assert capfd.readouterr() == ("", "")


@both
def test_the_assumed_order_of_uint8_pixels_is_doubted(tmp_path, runtime):
    cast = step("Cast", "x", "f", to=TensorProto.FLOAT)
    path = network(tmp_path / "net.onnx", cast, *means("f"), kind=TensorProto.UINT8)
    said: Said = []
    own = added(tmp_path, path, runtime, MemberOptions(), said=said).network_path("m0", "FP16")
    (tmp_path / "kept").mkdir()
    for file in own.parent.glob(f"{own.stem}.*"):
        file.rename(tmp_path / "kept" / file.name)
    added(tmp_path, tmp_path / "kept" / own.name, runtime, MemberOptions(), said=said)
    added(tmp_path, path, runtime, MemberOptions(color_order="BGR"), said=said)
    (_, facts, doubt), (_, _, of_its_own), (_, _, stated) = said
    assert facts.startswith("takes BGR pixels as they are")
    assert "if it was made for RGB, say --color-order RGB" in str(doubt)
    assert (of_its_own, stated) == (None, None)


def dies(folder: Path) -> str:
    """OpenVINO 2026.4 ends with a segmentation fault here; the command does not."""
    return f"a={network(folder / 'net.onnx', step('Conv', 'x', 'y'), *means('y'))}"


def leaves_the_set(folder: Path) -> str:
    return f"../a={network(folder / 'net.onnx', *means())}"


@cases("write, says", (dies, r"/net\.onnx"), (leaves_the_set, "name: String should match pattern"))
def test_what_another_process_meets_is_an_error_of_a_line(tmp_path, write, says):
    member, labels = write(tmp_path), text(tmp_path / "labels.txt", "a", "b", "c")
    words = ("models", "add", "made", "--member", member, "--into", tmp_path, "--labels", labels)
    error = tandem(*words).exception
    assert isinstance(error, ModelSetError)
    assert re.search(says, error.message)
    assert "\n" not in error.message
    assert not (tmp_path / "made").exists()
