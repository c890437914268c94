"""A set's own preprocess: whoever computes its answers calls it, and only where it is allowed."""

import sys
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.graph.request import ClassifyRequest
from app.serve.gateway import assemble
from app.settings import Settings
from app.stages.own_functions import identities
from app.telemetry.metrics import RequestObserver
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.offline import InProcessPipeline, LocalEnsemble, Setup
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from models.model_set import ModelSet, load_model_set
from models.own_functions import ALLOWED_VARIABLE
from tests.support.calibration.added_sets import added
from tests.support.cases import cases
from tests.support.runtime_files import float_onnx
from tests.support.tiny_networks import picture, write_pictures, write_tiny_set

SOURCE = """
import numpy as np

seen = []


def swapped(images):
    seen.append(images.shape)
    return images[..., ::-1].copy()


def both(images):
    return np.concatenate([images, images[..., ::-1]])


def smaller(images):
    return images[:, 1:]
"""
SWAPPED, BOTH = "own_of_set:swapped", "own_of_set:both"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_of_set.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    yield
    sys.modules.pop("own_of_set", None)


def a_set(folder: Path, preprocess: str | None, precision="INT8") -> ModelSet:
    made = write_tiny_set(folder / "tiny", precision=precision)
    write_manifest(made, read_manifest(made).model_copy(update={"preprocess": preprocess}))
    return load_model_set(str(made))


def allow(monkeypatch, *names: str) -> None:
    monkeypatch.setenv(ALLOWED_VARIABLE, ",".join(names))


def settings_of(made: ModelSet, **more) -> Settings:
    return Settings(model_set=str(made.folder), compile_cache=None, **more)


async def served_row(settings: Settings, color: str) -> dict[str, float]:
    service = assemble(settings).service
    request = ClassifyRequest([picture(color)], 3, 30.0, "t", RequestObserver(), cache_use="off")
    (answer,) = await service.classify(request)
    return {one.label: one.probability for one in answer.predictions}


def local_row(made: ModelSet, color: str) -> dict[str, float]:
    answer = LocalEnsemble(made, num_threads=1).classify(picture(color), top_k=3)
    return {one.label: one.probability for one in answer.predictions}


@pytest.mark.parametrize("allowed", [(), ("other.module:swapped",)])
def test_without_permission_nothing_is_imported(tmp_path, monkeypatch, allowed):
    made = a_set(tmp_path, SWAPPED, "FP16")
    pictures = write_pictures(tmp_path / "pictures")
    if allowed:
        allow(monkeypatch, *allowed)
    for run in (
        lambda: LocalEnsemble(made),
        lambda: InProcessPipeline(made, "FP16", Setup(1, 1, 1)),
        lambda: evaluate_set(made, read_dataset(pictures, made), ("FP16",)),
        lambda: quantize_set(made, Request(pictures, subset_size=4)),
        lambda: assemble(settings_of(made, precision="FP16", set_functions=allowed)),
    ):
        with pytest.raises(ConfigError, match=f"allow it with {ALLOWED_VARIABLE}={SWAPPED}"):
            run()
    assert "own_of_set" not in sys.modules


async def test_everyone_calls_it_where_it_is_allowed(tmp_path, monkeypatch):
    made = a_set(tmp_path, SWAPPED)
    allow(monkeypatch, "other.module:f", SWAPPED)
    served = await served_row(settings_of(made, set_functions=(SWAPPED,)), "red")
    assert max(served, key=served.__getitem__) == "mostly blue"
    assert local_row(made, "red") == pytest.approx(served, abs=1e-6)
    rows = InProcessPipeline(made, "INT8", Setup(2, 1, 1)).answer([picture("red")] * 2)
    assert rows.argmax(axis=1).tolist() == [0, 0]
    pictures = write_pictures(tmp_path / "pictures")
    found = evaluate_set(made, read_dataset(pictures, made), ("INT8",))
    assert found.scores["INT8"]["ensemble"].top1 == pytest.approx(
        1 / 3, abs=1e-3
    )  # green alone stays


async def test_views_are_averaged_by_everyone(tmp_path, monkeypatch):
    plain = local_row(a_set(tmp_path / "plain", None), "red")
    made = a_set(tmp_path, BOTH)
    allow(monkeypatch, BOTH)
    served = await served_row(settings_of(made, set_functions=(BOTH,)), "red")
    assert local_row(made, "red") == pytest.approx(served, abs=1e-6)
    blue, red = "mostly blue", "mostly red"
    assert served[blue] == pytest.approx(served[red], abs=1e-6)
    assert served[red] == pytest.approx((plain[red] + plain[blue]) / 2, abs=1e-6)


def test_int8_is_calibrated_on_what_it_returns(tmp_path, monkeypatch):
    made = a_set(tmp_path, SWAPPED, "FP16")
    allow(monkeypatch, SWAPPED)
    quantize_set(made, Request(write_pictures(tmp_path / "pictures"), subset_size=8))
    seen = sys.modules["own_of_set"].seen
    assert (
        len([shape for shape in seen if shape[0] == 1]) > 8
    )  # two of the trial have one and three
    quantised = load_model_set(str(made.folder))
    assert quantised.manifest.preprocess == SWAPPED
    assert "INT8" in quantised.manifest.members[0].networks


def test_it_belongs_to_the_sets_answers(tmp_path):
    with_it = a_set(tmp_path, SWAPPED)
    without = with_it.manifest.model_copy(update={"preprocess": None})
    assert with_it.manifest.fingerprint() != without.fingerprint()
    assert with_it.manifest.plan_key("INT8") != without.plan_key("INT8")
    changes = without.conditions.changes(with_it.manifest.conditions)
    assert changes == ["preprocess"]
    settings = settings_of(with_it, set_functions=(SWAPPED,))
    (before,) = identities(settings, with_it.manifest)  # of the response cache
    sys.modules.pop("own_of_set")
    (tmp_path / "own_of_set.py").write_text(SOURCE + "# changed")
    assert identities(settings, with_it.manifest) != (before,)


def test_a_setting_and_a_set_do_not_both_have_one(tmp_path):
    settings = settings_of(a_set(tmp_path, SWAPPED), preprocess=BOTH, set_functions=(SWAPPED,))
    with pytest.raises(ConfigError, match=f"has its own, {SWAPPED}: leave the setting out"):
        assemble(settings)


def test_models_add_tries_it_and_keeps_its_name(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(float_onnx())
    assert added(tmp_path, path, preprocess=SWAPPED).manifest.preprocess == SWAPPED


@cases(
    "name, says",
    ("own_of_set:smaller", r"smaller, tried on uint8 \(1, 16, 16, 3\), returned"),
    ("own_of_set:nothing", "module own_of_set has no nothing"),
    ("no_such_module:f", "there is no module no_such_module"),
)
def test_models_add_refuses_one_that_does_not_fit(tmp_path, name, says):
    path = tmp_path / "net.onnx"
    path.write_bytes(float_onnx())
    with pytest.raises(ConfigError, match=says):
        added(tmp_path, path, preprocess=name)
    with pytest.raises(ValueError, match="preprocess"):
        added(tmp_path, path, preprocess="no function")
    assert not (tmp_path / "sets").exists()
