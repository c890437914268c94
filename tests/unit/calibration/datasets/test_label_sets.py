"""Datasets whose images have any number of labels."""

import numpy as np
import pytest

from calibration.datasets.label_sets import read_label_sets, truth_of
from models.errors import ModelSetError
from models.model_set import ModelSet, load_model_set
from tests.support.scored_sets import LABELS, write_scored_images, write_scored_set


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return load_model_set(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


def listed(tmp_path, text: str):
    path = tmp_path / "list.csv"
    path.write_text(text, "utf-8")
    return path


def test_a_list_of_files_and_their_labels(tmp_path, scored_set):
    found = read_label_sets(write_scored_images(tmp_path / "x", 2), scored_set)
    assert [(one.path.name, one.classes) for one in found.images] == [
        ("black0.png", ()),
        ("black1.png", ()),
        ("cyan0.png", (0, 1)),
        ("cyan1.png", (0, 1)),
        ("red0.png", (2,)),
        ("red1.png", (2,)),
        ("white0.png", (0, 1, 2)),
        ("white1.png", (0, 1, 2)),
    ]
    assert found.notes == ()
    assert all(one.path.is_file() for one in found.images)
    expected = np.array([[0, 0, 0]] * 2 + [[1, 1, 0]] * 2 + [[0, 0, 1]] * 2 + [[1, 1, 1]] * 2)
    np.testing.assert_array_equal(truth_of(list(found.images), 3), expected)


def test_labels_by_number_with_spaces_and_twice(tmp_path, scored_set):
    found = read_label_sets(listed(tmp_path, "b.png, 2 ; 0;2\na.png,;\n"), scored_set)
    assert [one.classes for one in found.images] == [(), (0, 2)]
    assert found.notes == ("no images of 1 classes: has green; not in the means",)


def test_folders_give_each_image_one_label(tmp_path, scored_set):
    for label in LABELS[:2]:
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.png").write_bytes(b"")
    found = read_label_sets(tmp_path, scored_set)
    assert [one.classes for one in found.images] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.png,\nb.png,;\n", "no image has a label; each line is file,labels"),
        ("a.png,has blue;has yellow\n", "1 labels are no classes of scored, as has yellow"),
        ("a.png,has blue;1\n", "names classes in more than one way"),
        ("a.png,0\nb.png,1\na.png,1\n", r"lists 1 files twice, as .*a\.png.*with ; between"),
        ("a.png\n", "1 columns; file,label"),
        ("", "lists no image"),
    ],
)
def test_a_list_that_is_none(tmp_path, scored_set, text, says):
    with pytest.raises(ModelSetError, match=says):
        read_label_sets(listed(tmp_path, text), scored_set)
