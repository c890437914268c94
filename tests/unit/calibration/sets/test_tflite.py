"""Three TFLite networks as people download them: uint8 RGB, of three sizes, a batch of one each."""

import numpy as np
import pytest

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.sets.add_set import NewSet, add_set
from calibration.sets.import_network import import_network
from calibration.sets.options import FileOptions
from models.manifest import ENSEMBLE
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.imagenet_small import MEMBERS, links, new_set

pytestmark = pytest.mark.shared_data

NUM_IMAGES = 50
# Two standard errors less than on all 1,000 (tandem evaluate: 0.86, 0.76, 0.66, together 0.85).
# Colours in the wrong order, a wrong crop or classes that are one off cost far more.
LEAST_TOP1 = {"v2": 0.76, "v1": 0.64, "small": 0.52, ENSEMBLE: 0.74}


@pytest.fixture(scope="module")
def mobilenets(shared_data, tmp_path_factory):
    return add_set(new_set(shared_data / "imagenet-small"), tmp_path_factory.mktemp("sets"))


def test_their_metadata_is_read_and_agrees(shared_data):
    """They name their labels, and state the -1 to 1 that their quantisation makes of pixels."""
    folder = shared_data / "imagenet-small"
    labels = (folder / "labels.txt").read_text("utf-8").splitlines()
    for file in MEMBERS.values():
        found = import_network(folder / "tflite" / file, FileOptions(is_stated=False))
        assert list(found.labels or ()) == labels
        assert found.doubt is None


@pytest.mark.slow  # make test adds small TFLite networks in tests/unit/calibration/sets
def test_what_the_networks_say_of_themselves_is_kept(mobilenets):
    manifest = mobilenets.manifest
    assert [manifest.image_of(name).input_size for name in MEMBERS] == [224, 192, 160]
    assert [member.fixed_batch for member in manifest.members] == [None] * 3
    assert all(set(m.networks) == {"INT8"} and m.imported_int8 for m in manifest.members)
    assert (mobilenets.labels[0], len(mobilenets.labels)) == ("background", 1001)


@pytest.mark.slow  # as above
def test_they_know_fifty_photographs(mobilenets, shared_data, tmp_path):
    images = links(shared_data / "imagenet-small" / "images", tmp_path / "images", NUM_IMAGES)
    measured = evaluate_set(mobilenets, read_dataset(images, mobilenets), ("INT8",))
    found = {name: tally.score.top1 for name, tally in measured.tallies["INT8"].items()}
    assert measured.num_images == NUM_IMAGES
    assert all(found[name] >= least for name, least in LEAST_TOP1.items()), found


@pytest.mark.slow  # as above
def test_without_background_the_rest_share_its_probability(mobilenets, shared_data, tmp_path):
    folder = shared_data / "imagenet-small"
    for name in ("labels.txt", "class_ids.txt"):
        lines = (folder / name).read_text("utf-8").splitlines()[1:]
        (tmp_path / name).write_text("\n".join(lines), "utf-8")
    (member,) = [m for m in new_set(folder).members if m[0] == "small"]
    facts = NewSet(
        name="thousand",
        members=[member],
        labels=tmp_path / "labels.txt",
        class_ids=tmp_path / "class_ids.txt",
        member_class_ids={"small": folder / "class_ids.txt"},
    )
    made, options = add_set(facts, tmp_path / "sets"), RuntimeOptions(batch_sizes=(2,))
    images = np.random.default_rng(1).integers(0, 256, (2, 160, 160, 3)).astype(np.uint8)
    whole = CompiledNetwork(mobilenets.network_path("small"), options).predict(images)
    rows = CompiledNetwork(made.network_path("small"), options).predict(images)
    assert made.manifest.num_classes == 1000
    rest = whole[:, 1:] / whole[:, 1:].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rows, rest, atol=1e-4)
