"""Transformers are quantised as NNCF recommends for them, and their manifest says so."""

import nncf
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.quantization.quantize import has_attention, quantize, with_model_type
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.sets.transaction import write_manifest
from models.manifest import QuantizationOptions, read_manifest
from models.model_set import load_model_set
from tests.support.tiny_networks import (
    SIZE,
    save_model,
    tiny_model,
    write_pictures,
    write_tiny_set,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def attention_model(is_fused: bool = False) -> ov.Model:
    """u8 [?,16,16,3] -> the tiny network's answer, after pixels have attended to each other.

    ``is_fused``: in one operation, as PyTorch's scaled_dot_product_attention is converted.
    """
    pixels = ops.parameter([-1, SIZE, SIZE, 3], ov.Type.u8, name="pixels")
    tokens = ops.reshape(
        ops.multiply(ops.convert(pixels, "f32"), np.float32(1 / 255)),
        np.array([0, SIZE * SIZE, 3]),
        special_zero=True,
    )
    eye = np.eye(3, dtype=np.float32)
    query, key, value = (ops.matmul(tokens, eye * g, False, False) for g in (1.0, 1.0, 8.0))
    if is_fused:
        attended = ops.scaled_dot_product_attention(query, key, value)
    else:
        weights = ops.softmax(ops.matmul(query, key, False, True), 2)
        attended = ops.matmul(weights, value, False, False)
    logits = ops.reduce_mean(attended, np.array([1]), keep_dims=False)
    return ov.Model([ops.softmax(logits, 1)], [pixels], "attention")


def test_attention_is_seen_in_the_graph():
    assert has_attention(attention_model())
    assert has_attention(attention_model(is_fused=True))
    assert not has_attention(tiny_model())
    assert not has_attention(tiny_model(num_convolutions=2))


def test_what_the_options_say_goes_before_the_graph():
    asked = QuantizationOptions(model_type="convolutional")
    assert with_model_type(asked, attention_model()) == asked
    assert with_model_type(QuantizationOptions(), attention_model()).model_type == "transformer"
    assert with_model_type(QuantizationOptions(), tiny_model()).model_type == "convolutional"


@pytest.mark.parametrize(
    ("model", "expected"),
    [(attention_model, nncf.ModelType.TRANSFORMER), (tiny_model, None)],
    ids=["transformer", "convolutional"],
)
def test_nncf_is_told(monkeypatch, model, expected):
    told = []
    monkeypatch.setattr("nncf.quantize", lambda *_, **given: told.append(given))
    quantize(model(), [np.zeros((SIZE, SIZE, 3), np.uint8)], QuantizationOptions())
    assert [given["model_type"] for given in told] == [expected]


def test_the_manifest_keeps_it(tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", gains={"vit": 8.0}, precision="FP16")
    network = save_model(attention_model(), folder, "attention")
    manifest = read_manifest(folder)
    vit = manifest.members[0].model_copy(update={"networks": {"FP16": network}})
    write_manifest(folder, manifest.model_copy(update={"members": (vit,)}))
    said: list[str] = []
    request = Request(write_pictures(tmp_path / "pictures"), subset_size=8)
    quantize_set(load_model_set(str(folder)), request, said.append)
    (member,) = read_manifest(folder).members
    assert member.quantization.model_type == "transformer"
    assert "INT8" in member.networks
    assert "vit: quantising on 8 images, as a transformer: smooth quantisation" in said
