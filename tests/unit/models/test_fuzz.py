"""A few thousand mutations of manifests and image files."""

import pytest

from tests.support.fuzzing import ImageFuzz, ManifestFuzz, MetadataFuzz, run

SEED = 37
NUM_MANIFESTS, NUM_IMAGES = 150, 3000


def test_manifests(tmp_path):
    outcomes = run(ManifestFuzz(tmp_path), NUM_MANIFESTS, SEED)
    assert outcomes.keys() == {"taken", "model_set"}
    assert min(outcomes.values()) > NUM_MANIFESTS / 30


def test_image_files_and_their_metadata():
    outcomes = run(ImageFuzz(), NUM_IMAGES, SEED)
    assert {"taken", "corrupt_image", "not_an_image", "unsupported_format"} <= outcomes.keys()
    outcomes = run(MetadataFuzz(), NUM_IMAGES // 3, SEED)
    assert set(outcomes) == {f"orientation {number}" for number in range(1, 9)}


def test_a_mutation_that_raises_is_named_by_its_seed():
    def fail(_: object) -> str:
        raise KeyError("x")

    with pytest.raises(AssertionError, match=r'Random\("5/0"\): KeyError'):
        run(fail, 3, 5)
