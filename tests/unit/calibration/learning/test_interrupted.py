"""Ctrl-C, a full disk and bad sets: nothing is half-made, and the next run goes on."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.learning import features
from calibration.learning import learn as learning
from calibration.learning.features import FeatureCache
from calibration.learning.learn import Request, learn
from calibration.sets.transaction import Staging
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import ModelSet, load_model_set
from tests.support.calibration.noisy_pictures import write_noisy
from tests.support.full_disk import full_disk
from tests.support.tiny_networks import save_model, write_tiny_set


@pytest.fixture
def request_of(tiny_set, photographs, tmp_path):
    def make(**changes):
        facts = {
            "name": "own",
            "sources": [photographs],
            "into": tmp_path / "sets",
            "origin": load_model_set(str(tiny_set)),
        }
        return Request(**{**facts, **changes})

    return make


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "features")


def there(tmp_path):
    folder = tmp_path / "sets"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def interrupt(*_, **__):
    raise KeyboardInterrupt


STEPS = {
    "features": (features, "_computed"),
    "heads": (learning, "fit"),
    "networks": (Staging, "network"),
    "golden answers": (Staging, "golden"),
    "moving in": (Staging, "move_in"),
    "the card": (learning, "_write_card"),
}


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_command_leaves_no_set(step, request_of, cache, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(*STEPS[step], interrupt)
        with pytest.raises(KeyboardInterrupt):
            learn(request_of(), cache)
    assert there(tmp_path) == []
    learned = learn(request_of(), cache)
    assert learned.model_set.problems() == []
    assert there(tmp_path) == ["own"]


@pytest.mark.parametrize("step", ["heads", "networks", "golden answers", "moving in"])
def test_an_interrupted_addition_leaves_the_set_as_it_was(
    step, request_of, cache, tmp_path, monkeypatch
):
    before = learn(request_of(), cache).model_set
    more = request_of(sources=[write_noisy(tmp_path / "more", 3, 5)], before=before, origin=before)
    files = sorted(before.folder.iterdir())
    monkeypatch.setattr(*STEPS[step], interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn(more, cache)
    assert read_manifest(before.folder) == before.manifest
    assert before.problems() == []
    assert sorted(before.folder.iterdir()) == files


def test_features_computed_before_an_interruption_are_kept(request_of, cache, monkeypatch):
    computed = features._computed
    done: list[int] = []

    def some(batch, *others):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(batch))
        return computed(batch, *others)

    with monkeypatch.context() as patched:
        patched.setattr(features, "_computed", some)
        patched.setattr(features, "available_cpus", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            learn(request_of(), cache)
    again: list[int] = []

    def counted(batch, *others):
        again.append(len(batch))
        return computed(batch, *others)

    monkeypatch.setattr(features, "_computed", counted)
    learn(request_of(), cache)
    assert sum(again) == 36 - 16


def test_a_record_that_was_cut_short_is_dropped(request_of, cache):
    learn(request_of(), cache)
    for path in cache.folder.glob("*.features"):
        path.write_bytes(path.read_bytes()[:-5])
    learned = learn(request_of(is_replaced=True), cache)
    assert learned.num_photographs == 36


@pytest.mark.parametrize("free", [200, 1_500, 3_000])
def test_a_full_disk_leaves_no_set(free, request_of, cache, tmp_path):
    with full_disk(free), pytest.raises(ModelSetError, match="make room"):
        learn(request_of(), cache)
    assert there(tmp_path) == []


def test_a_set_without_a_place_to_cut_says_what_was_looked_for(request_of, cache, tmp_path):
    folder = write_tiny_set(tmp_path / "other", gains={"plain": 1.0})
    pixels = ops.parameter([-1, 16, 16, 3], ov.Type.u8)
    means = ops.reduce_mean(ops.convert(pixels, "f32"), np.array([1, 2]))
    network = save_model(ov.Model([ops.softmax(means, 1)], [pixels], "plain"), folder, "plain")
    manifest = read_manifest(folder)
    member = manifest.members[0].model_copy(update={"networks": {"INT8": network}})
    origin = ModelSet(folder, manifest.model_copy(update={"members": (member,)}))
    with pytest.raises(ModelSetError, match=r"plain\.xml has no place to cut: looked for"):
        learn(request_of(origin=origin), cache)
    assert there(tmp_path) == []


def test_a_folder_in_the_sets_place_is_left_alone(request_of, cache, tmp_path):
    (tmp_path / "sets" / "own").mkdir(parents=True)
    (tmp_path / "sets" / "own" / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(ModelSetError, match="exists; give another name"):
        learn(request_of(), cache)
    assert (tmp_path / "sets" / "own" / "notes.txt").read_text("utf-8") == "mine"
