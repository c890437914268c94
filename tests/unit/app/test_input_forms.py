"""Networks of grey input and of rectangles answer alike over every interface."""

import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from PIL import Image

from app.grpc import open_inference_pb2 as messages
from app.grpc.interface import GrpcInterface
from app.grpc.open_inference import OpenInferenceInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.http.api import create_api
from app.oip.inference import Inference
from app.serve.gateway import assemble
from app.settings import Settings
from calibration.commands.models import problems_running
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.offline import LocalEnsemble
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.sets.options import MemberOptions
from models.model_set import ModelSet, load_model_set
from models.network import RuntimeOptions, load
from tests.support.asgi_client import asgi_client
from tests.support.calibration.added_sets import added, softmax
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.images import encode
from tests.support.open_inference import binary_request, elements, outputs_of

HEIGHT, WIDTH = 24, 40
LABELS = ("left", "right", "top", "bottom")  # the half that is bright
GREY, COLOUR = MemberOptions(mean=(0.0,) * 3, scale=(255.0,) * 3), MemberOptions()


def weights(channels: int) -> np.ndarray:
    """Return (4, channels, H, W): each class adds its half, and takes the other away."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    halves = [x < WIDTH / 2, x >= WIDTH / 2, y < HEIGHT / 2, y >= HEIGHT / 2]
    signs = np.stack([np.where(half, 1.0, -1.0) for half in halves])[:, None]
    return np.repeat(signs / signs[0].size, channels, axis=1).astype(np.float32)


def network(channels: int) -> ov.Model:
    """Return float [N, C, H, W] -> logits, by a convolution as large as the picture."""
    pixels = ops.parameter([-1, channels, HEIGHT, WIDTH], ov.Type.f32)
    plain = ops.convolution(pixels, 8 * weights(channels), [1, 1], [0, 0], [0, 0], [1, 1])
    return ov.Model([ops.reduce_mean(plain, np.array([2, 3]), False)], [pixels], "halves")


def half(name: str, seed: int = 0, size: tuple[int, int] = (60, 80)) -> np.ndarray:
    """Return a picture, (H, W, 3) RGB, whose half of this name is bright."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    place = {"left": x < width / 2, "right": x >= width / 2}
    bright = (place | {"top": y < height / 2, "bottom": y >= height / 2})[name]
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    return (noise + 150 * bright[..., None]).astype(np.uint8)


def expected_of_grey(picture: np.ndarray) -> np.ndarray:
    """Compute a row with Pillow and NumPy: stretched, then grey."""
    resized = Image.fromarray(picture).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    grey = np.asarray(resized.convert("L"), np.float64) / 255
    return softmax(8 * (weights(1)[:, 0] * grey).sum(axis=(1, 2))[None])[0]


@pytest.fixture(scope="module", params=["grey", "grey on onnxruntime", "colour", "both"])
def made(request, tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    """A set of a grey network, of a colour network, or of both; all take rectangles."""
    folder = tmp_path_factory.mktemp("forms")
    kinds = {"grey": GREY, "colour": COLOUR}
    names = [*kinds] if request.param == "both" else [request.param.partition(" ")[0]]
    is_onnx = "onnx" in request.param
    paths = []
    for name in names:
        channels = 1 if name == "grey" else 3
        paths.append(folder / f"{name}.{'onnx' if is_onnx else 'xml'}")
        if is_onnx:
            paths[-1].write_bytes(as_onnx())
        else:
            ov.save_model(network(channels), paths[-1], compress_to_fp16=False)
    options = {f"m{place}": kinds[name] for place, name in enumerate(names)}
    return added(
        folder,
        *paths,
        labels=LABELS,
        runtime="onnxruntime" if is_onnx else None,
        options=MemberOptions(resize="letterbox" if names == ["colour"] else "stretch"),
        member_options=options,
    )


def as_onnx() -> bytes:
    """Return the grey network as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["one"]),
        helper.make_node("Flatten", ["one"], ["logits"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, HEIGHT, WIDTH])
    rows = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])
    kernel = numpy_helper.from_array(8 * weights(1), "kernel")
    graph = helper.make_graph(nodes, "halves", [image], [rows], [kernel])
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def write_folder(folder: Path) -> Path:
    for name in LABELS:
        (folder / name).mkdir(parents=True)
        for seed in range(4):
            (folder / name / f"{seed}.png").write_bytes(encode(half(name, seed), "PNG"))
    return folder


@pytest.mark.parametrize("is_grey", [False, True], ids=["colour picture", "grey picture"])
async def test_every_interface_gives_the_same_row(made, is_grey):
    picture = half("top", 9)
    if is_grey:
        picture[...] = picture[..., :1]
    file, pixels = encode(picture, "PNG"), made.manifest.inputs.read(encode(picture, "PNG"))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    (row,) = np.mean(
        [load(made.network_path(m.name, "FP16"), RuntimeOptions()).predict(pixels[None])
         for m in made.manifest.members],
        axis=0, keepdims=False,
    )  # fmt: skip
    if [m.name for m in made.manifest.members] == ["m0"] and "grey" in made.manifest.members[
        0
    ].source:
        np.testing.assert_allclose(row, expected_of_grey(picture), atol=2e-3)
    assert row.argmax() == LABELS.index("top")

    service = assemble(
        Settings(model_set=str(made.folder), precision="FP16", compile_cache=None)
    ).service
    name, found = made.name, {}
    async with asgi_client(create_api(service)) as client:
        answer = (await client.post("/v1/classify?top_k=4", content=file)).json()
        found["/v1"] = {p["label"]: p["probability"] for p in answer["predictions"]}
        served = (await client.get("/v1/models")).json()
        assert (served["input_size"], served["resize_shorter"]) == ([HEIGHT, WIDTH], WIDTH)
        inputs = (await client.get(f"/v2/models/{name}")).json()["inputs"]
        assert [i["shape"] for i in inputs if i["name"] == "pixels"] == [[-1, HEIGHT, WIDTH, 3]]
        for kind, (body, headers) in {
            "/v2 file": binary_request(elements(file)),
            "/v2 pixels": binary_request(
                pixels.tobytes(), name="pixels", datatype="UINT8", shape=[1, HEIGHT, WIDTH, 3]
            ),
        }.items():
            if is_grey and kind == "/v2 pixels":
                grey = np.ascontiguousarray(pixels[..., :1]).tobytes()
                form = {"name": "pixels", "datatype": "UINT8", "shape": [1, HEIGHT, WIDTH, 1]}
                body, headers = binary_request(grey, **form)
            reply = await client.post(f"/v2/models/{name}/infer", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
            found[kind] = dict(zip(LABELS, outputs_of(reply)["probabilities"], strict=True))
    message = ClassifyRequest(images=[file], top_k=4).SerializeToString()
    reply = await GrpcInterface(service).classify(stream_of(message), context_of())
    (result,) = reply.results
    found["grpc"] = {p.label: p.probability for p in result.classified.predictions}
    request = messages.ModelInferRequest(
        model_name=name,
        inputs=[{"name": "pixels", "datatype": "UINT8", "shape": [1, HEIGHT, WIDTH, 3]}],
        raw_input_contents=[pixels.tobytes()],
    )
    own = OpenInferenceInterface(Inference(service))
    reply = await own.call(
        "ModelInfer", stream_of(request.SerializeToString()), context_of(peer="ipv4:127.0.0.1:9")
    )
    found["/v2 grpc"] = dict(
        zip(LABELS, np.frombuffer(reply.raw_output_contents[0], np.float32), strict=True)
    )
    offline = LocalEnsemble(made, "FP16", 1).classify(file, top_k=4)
    found["offline"] = {p.label: p.probability for p in offline.predictions}
    for kind, probabilities in found.items():
        ordered = [probabilities[label] for label in LABELS]
        np.testing.assert_allclose(ordered, row, atol=1e-5, err_msg=kind)


def test_it_is_verified_measured_and_quantised(made, tmp_path):
    assert (made.problems(), problems_running(made)) == ([], [])
    pictures = write_folder(tmp_path / "pictures")
    found = evaluate_set(made, read_dataset(pictures, made), ("FP16",))
    assert found.scores["FP16"]["ensemble"].top1 == 1.0
    if "onnxruntime" in made.manifest.members[0].runtimes:
        return
    copied = load_model_set(str(shutil.copytree(made.folder, tmp_path / made.name)))
    quantize_set(copied, Request(images=pictures, subset_size=8))
    quantised = load_model_set(str(copied.folder))
    inputs = [made.manifest.inputs.read(encode(half(name, 99), "PNG")) for name in LABELS]
    for member in quantised.manifest.members:
        float_rows, int8_rows = (
            load(quantised.network_path(member.name, precision), RuntimeOptions()).predict(inputs)
            for precision in ("FP16", "INT8")
        )
        np.testing.assert_allclose(int8_rows, float_rows, atol=0.05)
