"""A folder per class: what it may be called and hold, and what is refused how."""

from pathlib import Path

import pytest

from calibration.datasets.labelled import LabelledImage, find_images, read_dataset
from models.errors import ModelSetError
from tests.support.calibration.labelled_files import IDS, listed, pairs, touch, with_names
from tests.support.tiny_networks import LABELS, write_pictures


def test_folders_called_as_the_labels(tmp_path, by_label):
    source = write_pictures(tmp_path / "colours" / "eval", num_per_color=2)
    found = read_dataset(source, by_label)
    assert found.name == "colours/eval"
    assert found.notes == ()
    assert pairs(found, source) == [
        (f"{label}/{number}.png", index) for index, label in enumerate(LABELS) for number in (0, 1)
    ]
    assert found.images[0] == LabelledImage(source / "mostly blue" / "0.png", 0)


def test_folders_called_as_the_class_ids_are_in_the_sets_order_not_in_theirs(tmp_path, by_id):
    source = touch(tmp_path, "n01/a.jpg", "n02/a.jpg", "n03/a.jpg")
    found = read_dataset(source, by_id)
    assert pairs(found, source) == [("n01/a.jpg", 1), ("n02/a.jpg", 2), ("n03/a.jpg", 0)]
    assert found.notes == ()


def test_labels_name_the_classes_of_a_set_with_ids_too(tmp_path, by_id):
    source = touch(tmp_path, "mostly red/a.jpg", "mostly blue/a.jpg", "mostly green/a.jpg")
    assert [i.class_index for i in read_dataset(source, by_id).images] == [0, 1, 2]


def test_what_is_both_an_id_and_a_label_is_an_id(tmp_path):
    model_set = with_names(tmp_path / "set", ("a", "b", "c"), ids=("c", "a", "b"))
    source = touch(tmp_path / "images", "a/x.jpg", "b/x.jpg")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [1, 2]


def test_a_class_without_images_is_noted(tmp_path, by_label):
    source = touch(tmp_path, "mostly green/a.jpg")
    found = read_dataset(source, by_label)
    assert pairs(found, source) == [("mostly green/a.jpg", 1)]
    assert found.notes == ("no images of 2 classes: mostly blue, mostly red",)


def test_an_empty_folder_of_a_class_is_a_class_without_images(tmp_path, by_label):
    source = touch(tmp_path, "mostly green/a.jpg", "mostly red/a.jpg", "mostly blue/notes.txt")
    assert read_dataset(source, by_label).notes == ("no images of 1 classes: mostly blue",)


def test_many_classes_without_images_are_not_all_listed(tmp_path):
    model_set = with_names(tmp_path / "set", tuple(f"class {i:03}" for i in range(40)))
    source = touch(tmp_path / "images", "class 039/a.jpg")
    (note,) = read_dataset(source, model_set).notes
    assert note.startswith("no images of 39 classes: class 000, class 001")
    assert "class 004, ... (39 in all)" in note


def test_strange_folders_are_taken_in_sorted_order_and_that_is_noted(tmp_path, by_label):
    source = touch(tmp_path, "c/a.jpg", "a/a.jpg", "b/a.jpg")
    found = read_dataset(source, by_label)
    assert pairs(found, source) == [("a/a.jpg", 0), ("b/a.jpg", 1), ("c/a.jpg", 2)]
    assert len(found.notes) == 1
    assert "in sorted order" in found.notes[0]


@pytest.mark.parametrize(
    "names",
    [
        ("a", "b"),  # one too few
        ("a", "b", "c", "d"),
        ("a", "b", "mostly red"),  # the third is a class by name, then the others should be too
    ],
)
def test_strange_folders_that_do_not_fit_are_refused(tmp_path, by_label, names):
    source = touch(tmp_path, *(f"{name}/a.jpg" for name in names))
    with pytest.raises(ModelSetError, match="are no classes of tiny, as a, b") as caught:
        read_dataset(source, by_label)
    assert "it has 3: mostly blue, mostly green, mostly red" in caught.value.message
    assert "for names by id add the set again: tandem models add --class-ids" in str(caught.value)


def test_sorted_order_is_not_guessed_where_the_ids_are_known(tmp_path, by_id):
    source = touch(tmp_path, "a/a.jpg", "b/a.jpg", "c/a.jpg")
    says = r"3 labels are no classes.*it has 3: n03, n01, n02.* as the set does$"
    with pytest.raises(ModelSetError, match=says):
        read_dataset(source, by_id)


def test_one_stranger_is_named(tmp_path, by_label):
    source = touch(tmp_path, *(f"{label}/a.jpg" for label in LABELS), "mostly pink/a.jpg")
    with pytest.raises(ModelSetError, match="1 labels are no classes of tiny, as mostly pink;"):
        read_dataset(source, by_label)


def test_ids_beside_labels_are_refused_for_what_they_are(tmp_path, by_id):
    source = touch(tmp_path, "n01/a.jpg", "mostly red/a.jpg")
    with pytest.raises(ModelSetError, match="more than one way, as mostly red, n01"):
        read_dataset(source, by_id)


def test_a_label_of_two_classes_is_refused(tmp_path):
    """ImageNet has two classes called crane."""
    model_set = with_names(tmp_path / "set", ("crane", "duck", "crane"))
    source = touch(tmp_path / "images", "crane/a.jpg", "duck/a.jpg")
    with pytest.raises(ModelSetError, match=r"crane is the name of 2 classes .*numbers 0, 2"):
        read_dataset(source, model_set)


def test_a_label_of_two_classes_hurts_only_if_it_is_used(tmp_path):
    model_set = with_names(tmp_path / "set", ("crane", "duck", "crane"))
    source = touch(tmp_path / "images", "duck/a.jpg")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [1]


def test_with_ids_or_numbers_two_classes_may_share_a_label(tmp_path):
    model_set = with_names(tmp_path / "set", ("crane", "duck", "crane"), ids=IDS)
    source = touch(tmp_path / "images", "n01/a.jpg", "n02/a.jpg", "n03/a.jpg")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [0, 1, 2]
    numbers = listed(tmp_path, "images/n03/a.jpg,2\nimages/n01/a.jpg,0\n")
    assert [i.class_index for i in read_dataset(numbers, model_set).images] == [0, 2]
    labels = listed(tmp_path, "images/n03/a.jpg,crane\n")
    with pytest.raises(ModelSetError, match="Use the class ids instead"):
        read_dataset(labels, model_set)


def test_hidden_folders_are_no_classes(tmp_path, by_label):
    source = touch(tmp_path, *(f"{label}/a.jpg" for label in LABELS))
    touch(source, ".ipynb_checkpoints/a.jpg", ".git/b.png")
    found = read_dataset(source, by_label)
    assert [i.class_index for i in found.images] == [0, 1, 2]
    assert found.notes == ()


def test_a_hidden_folder_above_the_images_does_not_hide_them(tmp_path, by_label):
    source = touch(tmp_path / ".cache" / "images", "mostly red/a.jpg")
    assert len(read_dataset(source, by_label).images) == 1
    assert len(find_images(source)) == 1


def test_files_of_macos_are_no_images_and_its_folder_is_no_class(tmp_path, by_label):
    touch(tmp_path, *(f"{label}/a.jpg" for label in by_label.labels), "__MACOSX/mostly red/._a.jpg")
    touch(tmp_path, "__MACOSX/._a.jpg", "mostly red/._a.jpg", "mostly red/b.jfif")
    assert [i.path.name for i in read_dataset(tmp_path, by_label).images] == [
        "a.jpg", "a.jpg", "a.jpg", "b.jfif",
    ]  # fmt: skip


def test_a_class_that_is_a_link_to_another_is_refused(tmp_path, by_label):
    touch(tmp_path, *(f"{label}/a.jpg" for label in by_label.labels[:2]))
    (tmp_path / by_label.labels[2]).symlink_to(tmp_path / by_label.labels[0])
    with pytest.raises(ModelSetError, match="stands under the labels"):
        read_dataset(tmp_path, by_label)


def test_only_image_files_of_a_class_folder_are_taken(tmp_path, by_label):
    wanted = ["a.jpg", "b.JPEG", "c.png", "d.webp"]
    source = touch(tmp_path, *(f"mostly red/{name}" for name in wanted))
    touch(source, "mostly red/e.txt", "mostly red/deeper/f.jpg", "g.jpg")
    (source / "mostly red" / "folder.jpg").mkdir()
    assert [i.path.name for i in read_dataset(source, by_label).images] == wanted


@pytest.mark.parametrize("content", [[], ["a.jpg"], ["mostly red/a.txt"], [".hidden/a.jpg"]])
def test_a_folder_without_labelled_images_is_refused(tmp_path, by_label, content):
    touch(tmp_path, *content)
    with pytest.raises(ModelSetError, match=r"no images in .*<class>/<name>\.jpg"):
        read_dataset(tmp_path, by_label)


def test_what_is_not_there_is_refused(tmp_path, by_label):
    with pytest.raises(ModelSetError, match="none is neither a folder nor a list"):
        read_dataset(tmp_path / "none", by_label)


def test_the_name_of_a_dataset_does_not_depend_on_how_it_is_given(tmp_path, by_label, monkeypatch):
    source = touch(tmp_path / "photos" / "val", "mostly red/a.jpg")
    monkeypatch.chdir(source)
    given = [source, Path(), Path("../val"), Path("mostly red/..")]
    assert {read_dataset(path, by_label).name for path in given} == {"photos/val"}


def test_a_folder_whose_name_is_not_utf8_gives_a_name_that_can_be_written(tmp_path, by_label):
    source = touch(tmp_path / "photos\udcff", "mostly red/a.jpg")
    name = read_dataset(source, by_label).name
    assert name.encode().endswith(b"/photos?")
