"""The ladder's order, what is asked of it, and the work folder with its results."""

import os
import shutil

import pytest

from calibration.ladder.rungs import SERVICE, LadderError, RungOptions, Store, rungs
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from tests.support.calibration.evaluated_sets import two_precisions
from tests.support.calibration.ladders import job_of, measured
from tests.support.runtime_files import write_mixed_set
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_tiny_set

ORDER = [
    "eager",
    "inference_mode",
    "batches",
    "threads",
    "channels_last",
    "torchscript",
    "compile",
    "torch_bf16",
    "onnxruntime",
    "openvino",
    "latency",
    "throughput",
    "fixed_shapes",
    "streams",
    "low_precision",
    "int8",
    "ensemble",
    "cascade",
    SERVICE,
]


def test_from_eager_pytorch_to_the_service():
    assert [rung.name for rung in rungs(2, 0.5)] == ORDER


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_every_choice_is_valid_and_uses_no_more_than_the_cores(cores):
    for rung in rungs(cores, 0.5):
        choices = rung.choices(RungOptions())
        assert len(set(choices)) == len(choices) > 0
        for options in choices:
            RungOptions.model_validate(options.model_dump())  # model_copy checks nothing
            assert (options.threads or 1) * options.callers <= cores


def test_a_rung_changes_its_own_and_keeps_the_rest():
    base = RungOptions(batch=16, is_inference_mode=True)
    (channels_last,) = (r for r in rungs(2, 0.5) if r.name == "channels_last")
    (options,) = channels_last.choices(base)
    assert options == base.model_copy(update={"is_channels_last": True})


def test_int8_tries_the_float_type_before_it_and_f32():
    (int8,) = (r for r in rungs(2, 0.5) if r.name == "int8")
    assert {o.float_type for o in int8.choices(RungOptions(float_type="bf16"))} == {"bf16", "f32"}
    assert {o.precision for o in int8.choices(RungOptions())} == {"INT8"}


def test_a_member_has_its_sets_size_and_classes(tiny_set, tmp_path):
    job = job_of(tiny_set, tmp_path, member="unsure")
    assert (job.network.name, job.network.size, job.network.num_classes) == ("unsure", 16, 3)
    assert job.network.model_set == tiny_set
    assert not job.network.is_random


def test_the_bundled_resnet50_has_a_pytorch_source_and_densenet169_has_none(tmp_path):
    resnet = job_of("imagenette", tmp_path)
    assert resnet.network.torch_source == "float_ir"
    assert resnet.impossible == {}
    densenet = job_of("imagenette", tmp_path, member="densenet169")
    assert "--random-weights --size 128" in densenet.impossible["eager"]
    assert "latency" not in densenet.impossible


def test_what_a_set_lacks_is_told_by_rung(tmp_path):
    only_int8 = job_of(write_tiny_set(tmp_path / "int8"), tmp_path).impossible
    assert "no float network" in only_int8["openvino"]
    assert {"int8", "ensemble", "service"}.isdisjoint(only_int8)
    only_float = write_tiny_set(tmp_path / "float", precision="FP16", gains={"one": 1.0})
    impossible = job_of(only_float, tmp_path).impossible
    assert "tandem quantize" in impossible["service"]
    assert "one member" in impossible["cascade"]
    assert {"openvino", "int8"}.isdisjoint(impossible)


def test_a_member_of_onnx_runtime_runs_as_it_is(tmp_path):
    mixed = write_mixed_set(tmp_path / "set", runtimes=("openvino", "onnxruntime"))
    assert {"ensemble", "cascade", "service"}.isdisjoint(job_of(mixed, tmp_path).impossible)


def test_both_precisions_leave_nothing_out_but_pytorch(tmp_path):
    job = job_of(two_precisions(tmp_path / "set"), tmp_path)
    engines = {rung.engine for rung in job.rungs if rung.name in job.impossible}
    assert engines == {"torch", "onnxruntime"}


@pytest.mark.parametrize(
    ("network", "asked", "kind", "message"),
    [
        ("resnet18", {"is_random": True, "size": 8}, LadderError, "32 to 1024 px"),
        ("resnet18", {"is_random": True, "num_classes": 1}, LadderError, "2 to 100000"),
        ("resnet18", {"is_random": True, "member": "a"}, LadderError, "--member with --random-w"),
        ("resnet18", {"is_random": True, "only": ["eagre"]}, LadderError, "eager, inference_mode"),
        ("resnet18", {"size": 64}, LadderError, "--size is of --random-weights"),
        ("../resnet18", {"is_random": True}, LadderError, "no name of a torchvision network"),
        ("nothing", {}, ModelSetError, "no model set"),
        ("imagenette", {"member": "vgg"}, ModelSetError, "has no member"),
    ],
)
def test_a_mistake_is_named(tmp_path, network, asked, kind, message):
    with pytest.raises(kind, match=message):
        job_of(network, tmp_path, **asked)


@pytest.mark.parametrize("option", ["network", "images", "work"])
def test_a_name_that_is_not_utf8_is_refused(tiny_set, tmp_path, option):
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(tiny_set, odd)
    asked = {"network": tiny_set, "work": tmp_path / "work"} | {option: odd}
    with pytest.raises(LadderError, match=r"caf\\xe9' is not UTF-8"):
        job_of(**asked)


def test_results_depend_on_the_networks_files(tiny_set, tmp_path):
    other = write_tiny_set(tmp_path / "other", gains={"sure": 3.0})
    assert job_of(tiny_set, tmp_path).fingerprint != job_of(other, tmp_path).fingerprint


def test_and_on_the_other_members_which_later_rungs_use(tmp_path):
    folder = write_tiny_set(tmp_path / "tiny")
    before, manifest = job_of(folder, tmp_path).fingerprint, read_manifest(folder)
    first, second = manifest.members
    heavier = second.model_copy(update={"weight": 3.0})
    write_manifest(folder, manifest.model_copy(update={"members": (first, heavier)}))
    assert job_of(folder, tmp_path, member=first.name).fingerprint != before


def test_a_multi_label_set_has_no_top1_and_no_cascade(tmp_path):
    folder = write_scored_set(tmp_path / "scored")
    with pytest.raises(LadderError, match="--images: scored is multi-label and has no top-1"):
        job_of(folder, tmp_path, images=tmp_path)
    impossible = job_of(folder, tmp_path).impossible
    assert "no margin for a cascade" in impossible["cascade"]
    assert "service" not in impossible


FACTS = {"network": "a", "seconds": 1.0}


def test_results_are_kept_for_resume_alone(tmp_path):
    store = Store(tmp_path / "new" / "work")
    with store.opened(FACTS, is_resumed=True):  # nothing there to resume: a beginning
        store.write("eager", measured(3.0))
    with store.opened(FACTS, is_resumed=True):
        assert store.read("eager") == measured(3.0)
    with store.opened(FACTS, is_resumed=False):
        assert store.read("eager") is None


def test_results_of_another_ladder_are_not_continued(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        store.write("eager", measured(3.0))
    with (
        pytest.raises(LadderError, match="other seconds"),
        store.opened(FACTS | {"seconds": 2.0}, is_resumed=True),
    ):
        pass
    with store.opened(FACTS, is_resumed=True):
        assert store.read("eager") is not None


def test_two_ladders_do_not_share_a_folder(tmp_path):
    with (
        Store(tmp_path).opened(FACTS, is_resumed=False),
        pytest.raises(LadderError, match="another ladder"),
        Store(tmp_path).opened(FACTS, is_resumed=False),
    ):
        pass


def test_the_files_of_somebody_else_stay(tmp_path):
    """A ladder removes what one before it left, also from results/ and logs/."""
    (tmp_path / "results").mkdir()
    kept = [tmp_path / "results" / "thesis.csv", tmp_path / "features.npy"]
    for path in kept:
        path.touch()
    for is_resumed in (False, True):
        with (
            pytest.raises(LadderError, match="no ladder's; give --work an empty folder"),
            Store(tmp_path).opened(FACTS, is_resumed=is_resumed),
        ):
            pass
    assert all(path.exists() for path in kept)


def test_networks_are_removed_with_the_parts_of_a_killed_preparation(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        before = sorted(tmp_path.iterdir())
        for name in ("int8.xml", "int8.bin", "partial-int8.xml", "partial-int8.bin", "a.onnx"):
            (tmp_path / name).touch()
        store.remove_networks()
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(LadderError, match="cannot write"),
        Store(tmp_path / "file").opened(FACTS, is_resumed=False),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", '{"outcome": "measured", "speed": 3}'])
def test_a_damaged_result_is_measured_again(tmp_path, text):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        (tmp_path / "results" / "eager.json").write_text(text)
        assert store.read("eager") is None


def test_only_its_own_files_are_removed(tmp_path):
    with Store(tmp_path).opened(FACTS, is_resumed=False):
        pass
    (tmp_path / "holiday.jpg").touch()
    (tmp_path / "int8.xml").touch()
    with Store(tmp_path).opened(FACTS, is_resumed=False):
        assert (tmp_path / "holiday.jpg").exists()
        assert not (tmp_path / "int8.xml").exists()


def test_no_partial_file_stays(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        store.write("eager", measured(3.0))
    assert not list(tmp_path.rglob("*.partial"))
