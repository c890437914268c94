"""What is asked of a ladder, checked before anything runs."""

import os
import shutil

import pytest

from calibration.ladder.rung import LadderError
from calibration.sets.durable import write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from tests.support.calibration.evaluated_sets import two_precisions
from tests.support.calibration.ladders import job_of
from tests.support.runtime_files import write_mixed_set
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_tiny_set


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
    ("asked", "message"),
    [
        ({"is_random": True, "size": 8}, "32 to 1024 px"),
        ({"is_random": True, "num_classes": 1}, "2 to 100000"),
        ({"is_random": True, "member": "a"}, "--member with --random-weights"),
        ({"is_random": True, "only": ["eagre"]}, "eager, inference_mode"),
        ({"is_random": False, "size": 64}, "--size is of --random-weights"),
    ],
)
def test_a_mistake_is_named(tmp_path, asked, message):
    with pytest.raises(LadderError, match=message):
        job_of("resnet18", tmp_path, **asked)


def test_a_name_that_is_no_torchvision_network_or_path(tmp_path):
    with pytest.raises(LadderError, match="no name of a torchvision network"):
        job_of("../resnet18", tmp_path, is_random=True)
    with pytest.raises(ModelSetError, match="no model set"):
        job_of("nothing", tmp_path)
    with pytest.raises(ModelSetError, match="has no member"):
        job_of("imagenette", tmp_path, member="vgg")


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
