"""A set whose members take different inputs: every stage real, in one process or behind handles."""

from pathlib import Path

import numpy as np
import pytest

from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, TensorRequest
from app.graph.service import EnsembleService
from app.messages import Fault
from app.oip.inference import Inference
from app.oip.models import Models
from app.responses import Classified
from app.settings import Settings
from calibration.offline import InProcessPipeline, OneImage, Setup
from models.ensemble import average
from models.image import read_image
from models.image_record import ImageRecord
from models.model_set import ModelSet, load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions
from tests.support.fakes import service_of
from tests.support.images import encode, make_scene
from tests.support.tiny_networks import write_tiny_set

OWN = {
    "small": ImageRecord(input_size=8, resize_shorter=9),
    "stretched": ImageRecord(input_size=16, resize_shorter=16, resize="stretch"),
}
GAINS = {"usual": 8.0, "small": -4.0, "stretched": 2.0}
PICTURES = [encode(make_scene(60, 40 + 9 * n), "PNG") for n in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_set(tmp_path_factory.mktemp("sets") / "three", gains=GAINS, images=OWN)


def service(folder: Path, *, as_handles: bool = False, **changes: object) -> EnsembleService:
    settings = Settings(model_set=str(folder), compile_cache=None, batch_sizes=(1, 4), **changes)
    decoder, combiner = Decoder(settings), Combiner(settings)
    members = {name: Classifier(settings, name) for name in GAINS}
    return service_of(settings, decoder, members, combiner, as_handles=as_handles)


def rows_in_process(model_set: ModelSet, data: bytes) -> dict[str, np.ndarray]:
    """Return what each network says of a picture that was read for it alone."""
    manifest, options = model_set.manifest, RuntimeOptions(batch_sizes=(1,))
    return {
        name: CompiledNetwork(model_set.network_path(name), options).predict(
            read_image(data, manifest.image_of(name).rule)[None]
        )
        for name in GAINS
    }


def check(answer: Classified | Fault, model_set: ModelSet, data: bytes) -> None:
    assert isinstance(answer, Classified)
    rows = rows_in_process(model_set, data)
    for name, opinion in answer.members.items():
        first = opinion.predictions[0]
        assert first.index == rows[name][0].argmax()
        assert first.probability == pytest.approx(float(rows[name].max()), abs=1e-4)
    mean = average({name: rows[name] for name in answer.members}, dict.fromkeys(rows, 1.0))[0]
    assert answer.predictions[0].probability == pytest.approx(float(mean.max()), abs=1e-4)


@pytest.mark.parametrize("as_handles", [False, True])
@pytest.mark.parametrize("margin", [None, 0.6])
async def test_each_image_is_answered_as_in_process(folder, as_handles, margin):
    model_set = load_model_set(str(folder))
    graph = service(folder, as_handles=as_handles, cascade_margin=margin)
    files = [PICTURES[0], b"no image", *PICTURES[1:]]
    answers = await graph.classify(ClassifyRequest(files, 2, 10.0, "id", RequestObserver()))
    assert isinstance(answers[1], Fault)
    for answer, data in zip([answers[0], *answers[2:]], PICTURES, strict=True):
        check(answer, model_set, data)
    (alone,) = await graph.classify(ClassifyRequest(PICTURES[:1], 2, 10.0, "id", RequestObserver()))
    check(alone, model_set, PICTURES[0])


async def test_the_bound_and_evaluation_make_the_same_inputs(folder):
    model_set = load_model_set(str(folder))
    rows = [rows_in_process(model_set, data) for data in PICTURES]
    means = np.concatenate([average(row, dict.fromkeys(row, 1.0)) for row in rows])
    bound = InProcessPipeline(model_set, "INT8", Setup(batch_size=4, streams=1, threads=1))
    np.testing.assert_allclose(bound.answer(PICTURES[:4]), means[:4], atol=1e-4)
    assert OneImage(model_set, "INT8").measure(PICTURES, num_images=1) > 0


async def test_pixels_are_for_a_member_alone(folder):
    graph = service(folder)
    told = graph.served_models()
    assert {m.name: m.input_size for m in told.members} == {
        "usual": 16,
        "small": 8,
        "stretched": 16,
    }
    models = Models(told)
    assert [t.name for t in models.find("tiny").metadata().inputs] == ["image"]
    assert models.find("tiny.small").metadata().inputs[1].shape == [-1, 8, 8, 3]
    pixels = read_image(PICTURES[0], OWN["small"].rule)[None]
    tensors = TensorRequest(pixels, "small")
    request = ClassifyRequest([], 2, 10.0, "id", RequestObserver(), tensors=tensors)
    (answer,) = await graph.classify(request)
    expected = rows_in_process(load_model_set(str(folder)), PICTURES[0])["small"]
    assert answer.predictions[0].probability == pytest.approx(float(expected.max()), abs=1e-4)
    names = [model.name for model in Inference(graph).models.all]
    assert names == ["tiny", *(f"tiny.{name}" for name in GAINS)]
