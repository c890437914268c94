"""The engines on tiny sets: each answers right, and a way that cannot run is skipped."""

from pathlib import Path

import numpy as np
import pytest

from calibration.evaluation import inference
from calibration.ladder import engines
from calibration.ladder.engines import (
    PIXELS_NAME,
    best_choice,
    outcome_of,
    quantize,
    quantized_by_random_images,
    random_pixels,
)
from calibration.ladder.rungs import PHOTOS, TRUTH, LadderJob, RungOptions, RungResult, SkippedError
from calibration.quantization.quantize import quantized_layers
from calibration.sets.transaction import write_manifest
from models.machine import needs_extra
from models.manifest import read_manifest
from models.network import LoadedNetwork, RuntimeOptions, load
from models.openvino_network import compile_with
from models.record import ImageRecord
from tests.support.calibration.evaluated_sets import two_precisions
from tests.support.calibration.ladders import tiny_job
from tests.support.cases import cases
from tests.support.plans import planned
from tests.support.runtime_files import write_mixed_set
from tests.support.tiny_networks import save_model, tiny_model, write_pictures, write_tiny_set

INT8 = RungOptions(precision="INT8")


def with_images(folder: Path, work: Path, **more) -> LadderJob:
    """A job whose ladder has labelled images: their preparation is done."""
    job = tiny_job(folder, work, images=write_pictures(work / "images"), **more)
    assert outcome_of(job, "labelled") == RungResult(outcome="prepared")
    return job


def rung(job, engine, choice):
    """Run a job's network in one way, which this machine can do."""
    result = outcome_of(job, engine, (choice,))
    assert result.outcome == "measured", result.reason
    assert result.figures is not None
    return result


@cases(
    "options",
    INT8,
    INT8.model_copy(update={"batch": 4, "is_static": True}),
    INT8.model_copy(update={"hint": "latency", "threads": 1}),
    INT8.model_copy(update={"hint": "throughput", "batch": 2}),
    INT8.model_copy(update={"streams": 2}),
)
def test_openvino_in_every_way_answers_right(tiny_set, tmp_path, options):
    result = rung(with_images(tiny_set, tmp_path, cores=2), "openvino", options)
    assert result.chosen == options
    assert (result.figures.top1, result.figures.num_labelled) == (1.0, 12)
    assert result.figures.images_per_s > 0
    assert "streams" in result.notes[0]


def test_float_and_int8_are_the_sets_own(tmp_path):
    folder = two_precisions(tmp_path / "set")
    for precision in ("FP16", "INT8"):
        job = tiny_job(folder, tmp_path)
        assert outcome_of(job, "openvino", [RungOptions(precision=precision)]).outcome == "measured"


def test_a_float_type_that_the_cpu_lacks_is_skipped_and_says_why(tiny_set, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "compile_with", compiled_in_f32)
    choices = [INT8.model_copy(update={"float_type": kind}) for kind in ("bf16", "f16")]
    result = outcome_of(tiny_job(tiny_set, tmp_path), "openvino", choices)
    assert result.outcome == "skipped"
    assert "no bf16" in result.reason
    assert "no f16" in result.reason


def compiled_in_f32(model, properties):
    return compile_with(model, {**properties, "INFERENCE_PRECISION_HINT": "f32"})


def test_the_ensemble_and_the_fast_plan(tmp_path):
    folder = write_tiny_set(tmp_path / "set")
    job = with_images(folder, tmp_path)
    whole = INT8.model_copy(update={"batch": 4})
    every = rung(job, "ensemble", whole)
    assert (every.figures.top1, every.notes) == (1.0, ("2 members for every image",))
    for stop_at, share in ((0.5, "100%"), (0.7, "0%")):
        planned(folder, (("unsure",), stop_at), (("sure",), None))
        result = rung(job, "ensemble", whole.model_copy(update={"plan": "fast"}))
        assert result.figures.top1 == 1.0
        assert result.notes == (f"unsure alone answered {share} (plan fast)",)


def test_the_fast_plan_goes_by_the_temperatures(tmp_path):
    """A first member that is likely enough by its logits alone goes on once it is tempered."""
    folder = write_tiny_set(tmp_path / "set")
    manifest = read_manifest(folder)
    first, *others = manifest.members
    tempered = (first.model_copy(update={"temperature": 20.0}), *others)
    job = with_images(folder, tmp_path)
    choice = INT8.model_copy(update={"batch": 4, "plan": "fast"})
    for members, share in ((manifest.members, "100%"), (tempered, "0%")):
        write_manifest(folder, manifest.model_copy(update={"members": members}))
        planned(folder, (("sure",), 0.6), (("unsure",), None))
        assert f"sure alone answered {share}" in rung(job, "ensemble", choice).notes[0]


def test_a_fast_plan_needs_images_and_fewer_than_a_batch_do(tiny_set, tmp_path):
    fast = INT8.model_copy(update={"plan": "fast"})
    result = outcome_of(tiny_job(tiny_set, tmp_path), "ensemble", [fast])
    assert (result.outcome, "--images" in result.reason) == ("skipped", True)
    job = with_images(tiny_set, tmp_path, max_images=3)
    choice = INT8.model_copy(update={"batch": 8})
    for engine in ("openvino", "ensemble"):
        result = rung(job, engine, choice)
        assert (result.figures.top1, result.figures.num_labelled) == (1.0, 3)


def test_labelled_images_are_kept_for_every_rung_and_the_service(tiny_set, tmp_path):
    with_images(tiny_set, tmp_path, max_images=5)
    pixels, truth = (np.load(tmp_path / name) for name in (PIXELS_NAME, TRUTH))
    assert (pixels.shape, pixels.dtype) == ((5, 16, 16, 3), np.uint8)
    photos = [link.readlink() for link in sorted((tmp_path / PHOTOS).iterdir())]
    class_names = sorted({photo.parent.name for photo in photos})
    assert len(truth) == len(photos)
    assert all(photo.is_file() for photo in photos)
    assert len(class_names) == len(set(truth.tolist()))


def test_images_of_other_classes_are_refused(tiny_set, tmp_path):
    (tmp_path / "images" / "cats").mkdir(parents=True)
    (tmp_path / "images" / "cats" / "a.png").write_bytes(b"no image")
    result = outcome_of(tiny_job(tiny_set, tmp_path, images=tmp_path / "images"), "labelled")
    assert (result.outcome, "cats" in result.reason) == ("failed", True)


def test_a_member_without_int8_gets_one_in_the_work_folder(tmp_path):
    folder = write_tiny_set(tmp_path / "set", precision="FP16", num_convolutions=1)
    before = sorted(path.name for path in folder.iterdir())
    quantize(tiny_job(folder, tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == before  # the set is nobody's to change
    result = outcome_of(tiny_job(folder, tmp_path), "openvino", [INT8])
    assert result.outcome == "measured", result.reason


def test_a_network_with_a_fixed_batch_is_quantised_as_tandem_quantize_does():
    model = tiny_model(num_convolutions=1)
    model.reshape([4, 16, 16, 3])
    made = quantized_by_random_images(model, tiny_job(Path("set"), Path("work")).network)
    assert list(made.input().shape) == [4, 16, 16, 3]
    assert quantized_layers(made)


def test_an_ensemble_with_a_member_of_onnx_runtime(tmp_path, monkeypatch):
    folder = write_mixed_set(tmp_path / "set", runtimes=("openvino", "onnxruntime"))
    runtimes = set[str]()

    def noted(path: Path, options: RuntimeOptions) -> LoadedNetwork:
        network = load(path, options)
        runtimes.add(network.runtime)
        return network

    monkeypatch.setattr(inference, "load", noted)
    choices = [INT8.model_copy(update={"batch": 4})]
    result = outcome_of(tiny_job(folder, tmp_path), "ensemble", choices)
    assert result.outcome == "measured", result.reason
    assert runtimes == {"openvino", "onnxruntime"}


def test_members_of_several_sizes(tmp_path):
    folder = write_tiny_set(tmp_path / "set")
    manifest = read_manifest(folder)
    sure, unsure = manifest.members
    larger = save_model(tiny_model(24, 2.0), folder, "larger")
    image = ImageRecord(input_size=24, resize_shorter=24)
    unsure = unsure.model_copy(update={"networks": {"INT8": larger}, "image": image})
    write_manifest(folder, manifest.model_copy(update={"members": (sure, unsure)}))
    planned(folder, (("sure",), 0.99), (("unsure",), None))
    job = with_images(folder, tmp_path)
    assert np.load(tmp_path / PIXELS_NAME).shape == (12, 16, 16, 3)
    choice = INT8.model_copy(update={"batch": 5, "plan": "fast"})
    for options in (choice, choice.model_copy(update={"plan": "full"})):
        assert rung(job, "ensemble", options).figures.top1 == 1.0
    assert rung(job, "openvino", INT8).figures.top1 == 1.0


def test_a_batch_that_is_built_in_is_the_only_choice(tmp_path):
    folder = write_tiny_set(tmp_path / "set")
    manifest, model = read_manifest(folder), tiny_model()
    model.reshape([2, 16, 16, 3])
    network = save_model(model, folder, "two")
    member = manifest.members[0].model_copy(update={"networks": {"INT8": network}})
    write_manifest(folder, manifest.model_copy(update={"members": (member,)}))
    choices = tuple(INT8.model_copy(update={"batch": batch}) for batch in (1, 2, 8))
    assert outcome_of(tiny_job(folder, tmp_path), "openvino", choices).chosen.batch == 2
    refused = outcome_of(tiny_job(folder, tmp_path), "openvino", choices[:1])
    assert (refused.outcome, refused.reason) == (
        "skipped",
        "the network takes 2 images at a time, not 1",
    )


def test_random_pixels_are_the_same_each_time():
    assert np.array_equal(random_pixels(2, 20), random_pixels(2, 20))
    assert not np.array_equal(random_pixels(2, 20, 1), random_pixels(2, 20, 2))
    assert random_pixels(2, 20).shape == (2, 20, 20, 3)


def test_the_fastest_choice_is_measured(monkeypatch):
    class Slow:
        notes = ()

        def __init__(self, options: RungOptions) -> None:
            self.calls = [lambda: work(options.batch)]

    def work(batch: int) -> None:
        for _ in range(200_000 if batch == 2 else 10):  # more time for two images than for one
            pass

    choices = (RungOptions(batch=2), RungOptions(batch=1))
    monkeypatch.setitem(engines.ENGINES, "openvino", lambda _, options: Slow(options))
    chosen, _ = best_choice(tiny_job(Path("set"), Path("work")), "openvino", choices)
    assert chosen.batch == 1


def test_choices_that_cannot_run_are_left_out(monkeypatch):
    def make_ready(_: LadderJob, options: RungOptions):
        if options.batch == 1:
            raise SkippedError("not that one")
        ready = type("Ready", (), {})()
        ready.calls = [lambda: None]
        return ready

    choices = (RungOptions(batch=1), RungOptions(batch=3))
    monkeypatch.setitem(engines.ENGINES, "openvino", make_ready)
    job = tiny_job(Path("set"), Path("work"))
    assert best_choice(job, "openvino", choices)[0].batch == 3
    with pytest.raises(SkippedError, match="not that one"):
        best_choice(job, "openvino", choices[:1])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, MemoryError])
def test_what_a_runtime_raises_is_a_failed_rung(tiny_set, tmp_path, monkeypatch, kind):
    def broken(*_: object):
        raise kind("a long story\nin many lines")

    monkeypatch.setitem(engines.ENGINES, "torch", broken)
    result = outcome_of(tiny_job(tiny_set, tmp_path), "torch", [INT8])
    assert (result.outcome, result.reason) == ("failed", f"{kind.__name__}: a long story")


def test_a_runtime_that_is_not_installed_is_a_skipped_rung(tiny_set, tmp_path, monkeypatch):
    def absent(*_: object):
        with needs_extra("ladder", "ladder"):
            raise ModuleNotFoundError("no", name="torch")

    monkeypatch.setitem(engines.ENGINES, "torch", absent)
    result = outcome_of(tiny_job(tiny_set, tmp_path), "torch", [INT8])
    assert result.outcome == "skipped"
    assert "needs torch" in result.reason
    assert "tandem-serve[ladder]" in result.reason
