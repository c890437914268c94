"""Networks that normalise pixels themselves get what they want, or the command asks for it."""

from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13 as ops

from calibration.sets.import_network import import_network
from calibration.sets.input import MEAN_RGB, SCALE_RGB, InputForm, Normalisation
from calibration.sets.input_range import fitted
from calibration.sets.options import FileOptions, MemberOptions
from models.errors import ModelSetError
from tests.support.calibration.added_sets import added, both, rows_of, softmax
from tests.support.calibration.tflite_metadata import tflite
from tests.support.cases import cases
from tests.support.images import make_scene

SIZE, NUM_CLASSES = 32, 12
MEAN, STD = np.divide(MEAN_RGB, 255), np.divide(SCALE_RGB, 255)
CAFFE = np.array([103.939, 116.779, 123.68])
RANDOM = np.random.default_rng(3)
KERNEL = RANDOM.normal(0, 0.3, (16, 3, 3, 3)).astype(np.float32)
HEAD = RANDOM.normal(0, 4, (16, NUM_CLASSES)).astype(np.float32)
HEAD -= HEAD.mean(axis=0)
LABELS = [f"class {number}" for number in range(NUM_CLASSES)]
SCENES = np.stack([make_scene(SIZE, SIZE, seed)[..., ::-1] for seed in range(3)])
SCENES = np.concatenate([SCENES, *(SCENES // n for n in (2, 5)), 255 - SCENES, SCENES[..., ::-1]])
SCENES = np.ascontiguousarray(SCENES)
close = partial(np.testing.assert_allclose, atol=2e-3)
Said = list[tuple[str, str, str | None]]
# Step by step: an operator, and its constant for each channel. What leaves is the network's own.
Steps = tuple[tuple[str, Any], ...]
EFFICIENTNET: Steps = (
    ("Mul", 1 / 255),
    ("Sub", MEAN),
    ("Div", np.sqrt(STD)),
    ("Div", np.sqrt(STD)),
)
MOBILENET: Steps = (("Mul", 1 / 127.5), ("Add", -1))
CONVNEXT: Steps = (("Sub", MEAN * 255), ("Div", STD * 255))
OF_FLOATS: Steps = (("Sub", MEAN), ("Div", STD))


def front(steps: Steps, planes: bool = True) -> tuple[list[Any], dict[str, Any], str]:
    """Return ONNX nodes from ``x``, their constants, and the last one's output."""
    nodes, weights, last = [], dict[str, Any](), "x"
    shape = (-1, 1, 1) if planes else (-1,)
    for number, (kind, value) in enumerate(steps):
        made, name = f"y{number}", f"c{number}"
        if kind == "Reverse":
            weights[name] = np.array([2, 1, 0])
            node = helper.make_node("Gather", [last, name], [made], axis=1 if planes else 3)
        elif kind == "Norm":
            mean, scale = value
            names = [f"{name}{part}" for part in "abcd"]
            rows = np.ones(3), np.zeros(3), mean, np.square(scale)
            weights |= dict(zip(names, (np.float32(row) for row in rows), strict=True))
            node = helper.make_node("BatchNormalization", [last, *names], [made], epsilon=0.0)
        elif kind == "Clip":
            weights |= {f"{name}a": np.float32(value[0]), f"{name}b": np.float32(value[1])}
            node = helper.make_node("Clip", [last, f"{name}a", f"{name}b"], [made])
        elif kind == "Cast":
            node = helper.make_node("Cast", [last], [made], to=value)
        elif kind == "Transpose":
            node = helper.make_node("Transpose", [last], [made], perm=value)
        elif kind == "Reshape":
            weights[name] = np.array(value)
            node = helper.make_node("Reshape", [last, name], [made])
        else:
            values = np.float32(value)
            weights[name] = values if np.ndim(values) == 0 else values.reshape(shape)
            node = helper.make_node(kind, [last, name], [made])
        nodes.append(node)
        last = made
    return nodes, weights, last


def network(
    path: Path,
    steps: Steps,
    kind: Any = TensorProto.FLOAT,
    planes: bool = True,
    absorbed: tuple[Any, float] = (0, 1),
) -> Path:
    """Write ``steps``, and behind them a small network whose classes depend on the range."""
    nodes, weights, last = front(steps, planes)
    if not planes:
        nodes.append(helper.make_node("Transpose", [last], ["planes"], perm=[0, 3, 1, 2]))
        last = "planes"
    nodes += [
        helper.make_node("Conv", [last, "kernel", "bias"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["c"]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "head"], ["logits"]),
    ]
    mean, scale = absorbed
    kernel = (KERNEL / scale).astype(np.float32)
    bias = -(kernel.sum(axis=(2, 3)) @ (np.zeros(3) + mean)).astype(np.float32)
    weights |= {"kernel": kernel, "bias": bias, "head": HEAD}
    sides = ["N", 3, SIZE, SIZE] if planes else ["N", SIZE, SIZE, 3]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, sides)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", NUM_CLASSES])],
        [numpy_helper.from_array(np.array(v), name) for name, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def right(mean: Any, scale: Any, images: np.ndarray = SCENES, order: int = -1) -> np.ndarray:
    """Return what the network behind answers to pixels less ``mean``, by ``scale``."""
    pixels = ((images[..., ::order] - np.array(mean)) / np.array(scale)).astype(np.float32)
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    maps = np.tanh(np.einsum("nhwcij,ocij->nhwo", windows, KERNEL, optimize=True))
    return softmax(maps.mean(axis=(1, 2)) @ HEAD)


def decoded(path: Path) -> np.ndarray:
    """Return a photograph as the network's pixels, BGR."""
    image = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return cv2.resize(image, (SIZE, SIZE))


def answered(folder, path, images=SCENES, said=None, runtime=None, options=None):
    heard: Said = [] if said is None else said
    made = added(
        folder, path, labels=LABELS, runtime=runtime, options=options or MemberOptions(),
        say=lambda *facts: heard.append(facts),
    )  # fmt: skip
    batches = (images[start : start + 8] for start in range(0, len(images), 8))
    return np.concatenate([rows_of(made, batch) for batch in batches])


IMAGENET = (MEAN_RGB, SCALE_RGB)
WAYS: dict[str, tuple[Steps, tuple[Any, Any], str]] = {
    "nothing": ((), IMAGENET, "assumed: its first layers normalise nothing"),
    "EfficientNet": (EFFICIENTNET, IMAGENET, "its first layers compute (x - 123.7,116.3,103.5)"),
    "MobileNetV3": (MOBILENET, (127.5, 127.5), "its first layers compute (x - 127.5) / 127.5"),
    "ConvNeXt": (CONVNEXT, IMAGENET, "RGB pixels as they are (its first layers"),
    "by 255": ((("Div", 255),), (0, 255), "its first layers compute x / 255"),
    "by 128": ((("Mul", 1 / 128), ("Sub", 1)), (128, 128), "RGB pixels as they are"),
    "floats": (OF_FLOATS, IMAGENET, "RGB / 255 (its first layers compute (x - 0.485,0.456,0.406)"),
    "centred floats": ((("Mul", 2), ("Sub", 1)), (127.5, 127.5), "RGB / 255"),
    "from -1": ((("Add", 1), ("Mul", 0.5)), (0, 255), "(RGB - 127.5) / 127.5"),
    "to 255": ((("Mul", 255),), (0, 1), "RGB / 255"),
    "undone": (  # torchvision's transform_input
        (("Mul", STD / 0.5), ("Add", (MEAN - 0.5) / 0.5)), (127.5, 127.5),
        "(RGB - 123.675,116.28,103.53) / 58.395,57.12,57.375 (its first layers",
    ),
    "batch norm": ((("Norm", (MEAN * 255, STD * 255)),), IMAGENET, "RGB pixels as they are"),
    "own batch norm": ((("Norm", ((99, 80, 90), (40, 45, 50))),), ((99, 80, 90), (40, 45, 50)),
                       "RGB pixels as they are"),
    "batch norm of normalised": ((("Norm", ((0.1, 0, -0.1), (1.1, 1.2, 1.3))),),
                                 (MEAN_RGB + np.array(SCALE_RGB) * (0.1, 0, -0.1),
                                  np.array(SCALE_RGB) * (1.1, 1.2, 1.3)), "assumed"),
    "clipped": ((("Clip", (0, 1)),), (0, 255), "its first layers take values from 0.0 to 1.0"),
    "reshaped": (
        (("Reshape", (0, 3, -1)), ("Div", 255), ("Reshape", (0, 3, SIZE, SIZE))), (0, 255),
        "RGB pixels as they are",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_network_gets_the_pixels_that_its_first_layers_want(tmp_path, way):
    steps, (mean, scale), says = WAYS[way]
    said: Said = []
    found = answered(tmp_path, network(tmp_path / "net.onnx", steps), said=said)
    close(found, right(mean, scale))
    assert np.abs(right(mean, scale) - right(mean, np.multiply(scale, 255))).max() > 0.1
    assert says in said[0][1]
    assert said[0][2] is None


@both
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32])
def test_casts_and_transposes_may_come_first(tmp_path, runtime, kind):
    """Integer inputs are pixels anyway; here their means tell the order of colours too."""
    steps = (("Cast", TensorProto.FLOAT), *CONVNEXT)
    path = network(tmp_path / "net.onnx", steps, kind, planes=False)
    said: Said = []
    close(answered(tmp_path, path, said=said, runtime=runtime), right(*IMAGENET))
    assert said[0][2] is None


@both
def test_means_tell_the_order_of_colours(tmp_path, runtime):
    """Caffe's networks take BGR; Keras' copies of them turn RGB round themselves."""
    caffe = right(CAFFE, 1, order=1)
    steps: Steps = (("Sub", CAFFE),)
    for number, more in enumerate((steps, (("Reverse", None), *steps))):
        path, said = network(tmp_path / f"{number}.onnx", more), Said()
        close(answered(tmp_path, path, said=said, runtime=runtime), caffe)
        assert f"takes {('BGR', 'RGB')[number]} pixels as they are" in said[0][1]


@both
def test_a_reversal_without_means_is_asked_about(tmp_path, runtime):
    path = network(tmp_path / "net.onnx", (("Reverse", None), ("Div", 255)))
    with pytest.raises(ModelSetError, match=r"reverses the colours itself.*--color-order RGB or"):
        answered(tmp_path, path, runtime=runtime)
    stated = MemberOptions(color_order="BGR")
    close(answered(tmp_path, path, options=stated, runtime=runtime), right(0, 255))


def test_what_is_unclear_is_asked_about(tmp_path):
    path = network(tmp_path / "net.onnx", (("Mul", 4.4),))
    says = "x / 0.2273, and it is unclear.*--mean 127.5 --scale 127.5 .*--mean 0 --scale 255"
    with pytest.raises(ModelSetError, match=says):
        answered(tmp_path, path)
    stated = MemberOptions(mean=(0.0,) * 3, scale=(255.0,) * 3)
    close(answered(tmp_path, path, options=stated), right(0, 255 / 4.4))


@cases(
    "absorbed, takes",
    (
        (MEAN_RGB, 58.0),
        "RGB pixels as they are (the bias of its first convolution holds the mean 1",
    ),
    (
        (CAFFE, 1.0),
        "BGR pixels as they are (the bias of its first convolution holds the mean 103.9",
    ),
    (
        (127.5, 127.5),
        "RGB pixels as they are (the bias of its first convolution holds the mean 127",
    ),
    ((MEAN, 0.225), "RGB / 255 (the bias of its first convolution holds the mean 0.485,0.456"),
    ((0.5, 0.5), "RGB / 255 (the bias of its first convolution holds the mean 0.5)"),
)
def test_a_mean_in_the_first_convolution_is_found(tmp_path, absorbed, takes):
    path = network(tmp_path / "net.onnx", (), absorbed=absorbed)
    imported = import_network(path, FileOptions(is_stated=False))
    assert imported.facts.startswith(f"takes {takes}")
    assert imported.doubt is None


@both
def test_a_division_in_the_first_convolution_is_asked_about(tmp_path, runtime):
    path, said = network(tmp_path / "net.onnx", (), absorbed=(0, 255)), Said()
    says = r"first convolution are as small as .*--mean 0 --scale 1 \(0 to 255\); --mean 0 --scale"
    with pytest.raises(ModelSetError, match=says):
        answered(tmp_path, path, runtime=runtime)
    raw = MemberOptions(mean=(0.0,) * 3, scale=(1.0,) * 3)
    close(answered(tmp_path, path, said=said, runtime=runtime, options=raw), right(0, 255))
    assert said[0][2] is None


@cases("steps", EFFICIENTNET, MOBILENET, CONVNEXT)
def test_what_was_stated_is_kept_and_doubted(tmp_path, steps):
    stated, said = MemberOptions(mean=MEAN_RGB, scale=SCALE_RGB), Said()
    path = network(tmp_path / "net.onnx", steps)
    answered(tmp_path, path, said=said, options=stated)
    assert "(as stated)" in said[0][1]
    assert "--mean 0 --scale 1). With the mean and scale that were stated" in str(said[0][2])
    raw = MemberOptions(mean=(0.0,) * 3, scale=(1.0,) * 3)
    answered(tmp_path, path, said=said, options=raw)
    assert said[1][2] is None


def test_a_colour_order_against_the_means_is_doubted(tmp_path):
    said: Said = []
    options = MemberOptions(color_order="BGR")
    answered(tmp_path, network(tmp_path / "net.onnx", CONVNEXT), said=said, options=options)
    assert "of RGB, and --color-order says BGR" in str(said[0][2])


def test_members_may_want_different_ranges(tmp_path):
    """Each member is read by itself; one stated by --member-options stays as stated."""
    said: Said = []
    paths = [
        network(tmp_path / f"{number}.onnx", steps)
        for number, steps in enumerate((MOBILENET, OF_FLOATS, ()))
    ]
    added(tmp_path, *paths, labels=LABELS, say=lambda *facts: said.append(facts))
    takes = [facts.split(" (")[0] for _, facts, _ in said]
    assert takes[:2] == ["takes RGB pixels as they are", "takes RGB / 255"]
    assert "assumed" in said[2][1]


def as_tensors(kind: str) -> ov.Model:
    """Return a network of OpenVINO's operators, as TFLite's, PyTorch's and quantised files have."""
    sides = [1, SIZE, SIZE, 3] if kind == "TFLite" else [-1, 3, SIZE, SIZE]
    pixels = ops.parameter(sides, np.float32, name="pixels")
    half, planes = np.float32(127.5), pixels
    if kind == "TFLite":
        planes = ops.transpose(
            ops.subtract(ops.multiply(pixels, 1 / half), np.float32(1)), [0, 3, 1, 2]
        )
    elif kind == "depthwise":
        weights = np.full((3, 1, 1, 1, 1), 1 / half, np.float32)
        planes = ops.add(
            ops.group_convolution(pixels, weights, [1, 1], [0, 0], [0, 0], [1, 1]), np.float32(-1)
        )
    elif kind == "one by one":
        weights = (np.eye(3)[::-1] / half).reshape(3, 3, 1, 1).astype(np.float32)
        bias = (-CAFFE / half).reshape(1, 3, 1, 1).astype(np.float32)
        planes = ops.add(ops.convolution(pixels, weights, [1, 1], [0, 0], [0, 0], [1, 1]), bias)
    elif kind == "split":
        rows = zip(
            ops.split(pixels, np.int64(1), 3).outputs(),
            *np.array(IMAGENET, np.float32),
            strict=True,
        )
        parts = [ops.divide(ops.subtract(part, mean), scale) for part, mean, scale in rows]
        planes = ops.concat([part.output(0) for part in parts], 1)
    elif kind in ("-1 to 1", "0 to 255"):
        low, high = (
            np.float32(side) for side in ((-1, 127 / 128) if kind == "-1 to 1" else (0, 255))
        )
        planes = ops.fake_quantize(pixels, low, high, low, high, 256)
    maps = ops.tanh(ops.convolution(planes, KERNEL, [1, 1], [1, 1], [1, 1], [1, 1]))
    logits = ops.matmul(ops.reduce_mean(maps, np.array([2, 3]), False), HEAD, False, False)
    return ov.Model([logits], [pixels], kind)


@cases(
    "kind, takes",
    ("TFLite", "RGB pixels as they are (its first layers compute (x - 127.5) / 127.5"),
    ("depthwise", "RGB pixels as they are (its first layers compute (x - 127.5) / 127.5"),
    ("split", "RGB pixels as they are (its first layers compute (x - 123.7,116.3,103.5)"),
    ("-1 to 1", "(RGB - 127.5) / 127.5 (its first layers take values from -1.0 to 1.0"),
    ("0 to 255", "RGB pixels as they are (its first layers take values from 0.0 to 255.0"),
)
def test_layers_of_other_kinds_are_read(tmp_path, kind, takes):
    ov.save_model(as_tensors(kind), tmp_path / "net.xml")
    imported = import_network(tmp_path / "net.xml", FileOptions(is_stated=False))
    assert imported.facts.startswith(f"takes {takes}")
    assert imported.doubt is None


def fitted_tflite(path, own=(), kind=np.float32, stated=None, **metadata):
    """Fit a network of NHWC pixels whose first layers multiply and add ``own``."""
    pixels = ops.parameter([1, SIZE, SIZE, 3], kind, name="pixels")
    planes = ops.convert(pixels, "f32") if kind != np.float32 else pixels
    if own:
        planes = ops.add(ops.multiply(planes, np.float32(own[0])), np.float32(own[1]))
    maps = ops.reduce_mean(planes, np.array([1, 2]), False)
    model = ov.Model([ops.matmul(maps, HEAD[:3], False, False)], [pixels], "net")
    options = FileOptions(is_stated=stated is not None)
    if stated is not None:
        mean, scale = stated
        options = FileOptions(normalisation=Normalisation((mean,) * 3, (scale,) * 3))
    form = InputForm(SIZE, "NHWC", 1)
    return fitted(model, form, options, tflite(path / "net.tflite", **metadata))


@cases(
    "mean, scale, wants",
    ((127.5,), (127.5,), "(RGB - 127.5) / 127.5"),
    ((127,), (128,), "(RGB - 127.5) / 127.5"),
    ((0,), (255,), "RGB / 255"),
    ((0,), (1,), "RGB pixels as they are"),
    (MEAN_RGB, SCALE_RGB, "(RGB - 123.675,116.28,103.53) / 58.395,57.12,57.375"),
    ((117,), (1,), "RGB - 117"),
    ((91.5, 80, 72), (60, 61, 62), "(RGB - 91.5,80,72) / 60,61,62"),
)
def test_what_tflites_metadata_says_of_pixels_is_taken(tmp_path, mean, scale, wants):
    fit = fitted_tflite(tmp_path, mean=mean, scale=scale)
    assert fit.options.normalisation.formula() == wants
    assert "its metadata has mean" in fit.note
    assert fit.doubt is None
    fit = fitted_tflite(tmp_path, mean=mean, scale=scale, stated=(33.0, 44.0))
    assert fit.options.normalisation.formula() == "(RGB - 33) / 44"
    assert "its metadata has mean" in str(fit.doubt)


@cases("mean, scale", ((), ()), ((float("nan"),), (1,)), ((0,), (0,)), ((1, 2), (3, 4)))
def test_metadata_that_says_nothing_leaves_it_to_the_layers(tmp_path, mean, scale):
    fit = fitted_tflite(tmp_path, (1 / 255, 0), mean=mean, scale=scale)
    assert fit.options.normalisation.formula() == "RGB pixels as they are"
    assert "its first layers compute x / 255" in fit.note


def test_metadata_that_the_layers_contradict_is_asked_about(tmp_path):
    both_ways = r"mean 0, scale 255, and its first layers compute x / 255, and it is unclear"
    with pytest.raises(ModelSetError, match=both_ways):
        fitted_tflite(tmp_path, (1 / 255, 0), mean=(0,), scale=(255,))
    assert fitted_tflite(tmp_path, (1 / 255, 0), mean=(0,), scale=(1,)).doubt is None


@cases(
    "kind, own, metadata, levels",
    (np.uint8, (1 / 127.5, -1), ((127.5,), (127.5,)), None),
    (np.uint8, (1 / 128, -127 / 128), ((127,), (128,)), None),
    (np.int8, (1 / 127.5, 0.5 / 127.5), ((127.5,), (127.5,)), None),
    (np.uint8, (1 / 255, 0), ((127.5,), (127.5,)), "-255 to 255"),
    (np.int8, (1 / 255, 0), ((0,), (255,)), "128 to 383"),
)
def test_quantised_pixels_are_compared_with_the_metadata(tmp_path, kind, own, metadata, levels):
    """By both, numbers that the network takes are pixels; or they are others, and that is said."""
    fit = fitted_tflite(tmp_path, own, kind, mean=metadata[0], scale=metadata[1])
    assert fit.doubt is None if levels is None else f"makes {levels} of pixels" in str(fit.doubt)


def test_what_mixes_channels_is_no_normalisation(tmp_path):
    """A layer of grey, and pictures normalised by their own mean: nothing is read from these."""
    fit = fitted(as_tensors("one by one"), InputForm(SIZE), FileOptions(is_stated=False), tmp_path)
    assert "compute" in fit.note
    pixels = ops.parameter([-1, 3, SIZE, SIZE], np.float32)
    own = ops.subtract(pixels, ops.reduce_mean(pixels, np.array([1, 2, 3]), True))
    mixed = ops.convolution(own, KERNEL[:3, :, :1, :1], [1, 1], [0, 0], [0, 0], [1, 1])
    fit = fitted(
        ov.Model([mixed], [pixels], "m"), InputForm(SIZE), FileOptions(is_stated=False), tmp_path
    )
    assert fit.note == " (assumed: its first layers normalise nothing)"


@cases(
    "factor, takes",
    (1 / 255, "takes grey pixels as they are (its first layers compute x / 255)"),
    (4.4, "refused"),
)
@pytest.mark.parametrize("sides", [[-1, 1, SIZE, 2 * SIZE], [-1, SIZE, 2 * SIZE]])
def test_grey_networks_and_rectangles_are_read_too(tmp_path, sides, factor, takes):
    pixels = ops.parameter(sides, np.float32, name="pixels")
    scaled = ops.multiply(pixels, np.float32(factor))
    flat = ops.reshape(scaled, np.array([0, -1]), special_zero=True)
    weights = np.linspace(-1, 1, 2 * SIZE * SIZE * 4, dtype=np.float32).reshape(-1, 4)
    model = ov.Model([ops.matmul(flat, weights, False, False)], [pixels], "grey")
    ov.save_model(model, tmp_path / "net.xml")
    if takes == "refused":
        with pytest.raises(ModelSetError, match="--scale 255"):
            import_network(tmp_path / "net.xml", FileOptions(is_stated=False))
        return
    imported = import_network(tmp_path / "net.xml", FileOptions(is_stated=False))
    assert imported.facts.startswith(takes)


@both
@pytest.mark.shared_data
def test_sixty_photographs_through_networks_as_keras_makes_them(tmp_path, shared_data, runtime):
    files = sorted((shared_data / "photos").iterdir())[:60]
    images = np.stack([decoded(file) for file in files])
    for name, (steps, trained) in {
        "efficientnet": (EFFICIENTNET, IMAGENET),
        "mobilenet_v3": (MOBILENET, (127.5, 127.5)),
        "convnext": (CONVNEXT, IMAGENET),
    }.items():
        path = network(
            tmp_path / f"{name}.onnx", (("Cast", TensorProto.FLOAT), *steps), planes=False
        )
        wanted, twice = right(*trained, images), MemberOptions(mean=MEAN_RGB, scale=SCALE_RGB)
        assert len(set(wanted.argmax(axis=1).tolist())) > 3
        found = answered(tmp_path, path, images, runtime=runtime)
        assert (found.argmax(axis=1) == wanted.argmax(axis=1)).sum() == 60
        found = answered(tmp_path, path, images, runtime=runtime, options=twice)
        assert (found.argmax(axis=1) == wanted.argmax(axis=1)).sum() < 45
