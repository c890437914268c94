"""Datasets: folders per class, lists of files and labels, images with any number of labels."""

from pathlib import Path

import numpy as np
import pytest

from calibration.datasets import (
    LabelledImage,
    find_images,
    label_truth_of,
    read_dataset,
    read_label_sets,
)
from models.errors import ModelSetError
from models.model_set import ModelSet, load_model_set
from tests.support.calibration.labelled_files import IDS, listed, pairs, touch, with_names
from tests.support.scored_sets import write_scored_images, write_scored_set
from tests.support.tiny_networks import LABELS, write_pictures


@pytest.fixture(scope="module")
def by_label(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return with_names(tmp_path_factory.mktemp("sets") / "labels")


@pytest.fixture(scope="module")
def by_id(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    """Ids sort otherwise than the labels do, so that a mistaken order shows."""
    return with_names(tmp_path_factory.mktemp("sets") / "ids", ids=("n03", "n01", "n02"))


def test_folders_called_as_the_labels(tmp_path, by_label):
    source = write_pictures(tmp_path / "colours" / "eval", num_per_color=2)
    dataset = read_dataset(source, by_label)
    assert dataset.name == "colours/eval"
    assert dataset.notes == ()
    assert pairs(dataset, source) == [
        (f"{label}/{number}.png", index) for index, label in enumerate(LABELS) for number in (0, 1)
    ]
    assert dataset.images[0] == LabelledImage(source / "mostly blue" / "0.png", 0)


BY_LABEL, BY_ID = (LABELS, ()), (LABELS, ("n03", "n01", "n02"))  # labels and ids of sets
CRANES = (("crane", "duck", "crane"), ())  # ImageNet has two classes called crane
EVERY = tuple(f"{label}/a.jpg" for label in LABELS)
NONE_OF_TWO = ("no images of 2 classes: mostly blue, mostly red",)
NO_BLUE = ("no images of 1 classes: mostly blue",)


@pytest.mark.parametrize(
    ("of_set", "files", "indices", "notes"),
    [
        (BY_ID, ("n01/a.jpg", "n02/a.jpg", "n03/a.jpg"), [1, 2, 0], ()),  # in the set's order
        (BY_ID, EVERY, [0, 1, 2], ()),  # labels, though the set has ids
        ((("a", "b", "c"), ("c", "a", "b")), ("a/x.jpg", "b/x.jpg"), [1, 2], None),  # ids first
        (BY_LABEL, ("mostly green/a.jpg",), [1], NONE_OF_TWO),
        (BY_LABEL, (*EVERY[1:], "mostly blue/notes.txt"), [1, 2], NO_BLUE),
        (BY_LABEL, (*EVERY, ".ipynb_checkpoints/a.jpg", ".git/b.png"), [0, 1, 2], ()),
        (CRANES, ("duck/a.jpg",), [1], None),  # another label of two classes is not used
    ],
    ids=["ids", "labels", "both", "absent", "empty", "hidden", "unused"],
)
def test_folders_of_classes(tmp_path, of_set, files, indices, notes):
    labels, ids = of_set
    model_set = with_names(tmp_path / "set", labels, **({"ids": ids} if ids else {}))
    dataset = read_dataset(touch(tmp_path / "images", *files), model_set)
    assert [image.class_index for image in dataset.images] == indices
    assert notes is None or dataset.notes == notes


def test_many_classes_without_images_are_not_all_listed(tmp_path):
    model_set = with_names(tmp_path / "set", tuple(f"class {i:03}" for i in range(40)))
    source = touch(tmp_path / "images", "class 039/a.jpg")
    (note,) = read_dataset(source, model_set).notes
    assert note.startswith("no images of 39 classes: class 000, class 001")
    assert "class 004, ... (39 in all)" in note


def test_strange_folders_are_taken_in_sorted_order_and_that_is_noted(tmp_path, by_label):
    source = touch(tmp_path, "c/a.jpg", "a/a.jpg", "b/a.jpg")
    dataset = read_dataset(source, by_label)
    assert pairs(dataset, source) == [("a/a.jpg", 0), ("b/a.jpg", 1), ("c/a.jpg", 2)]
    assert len(dataset.notes) == 1
    assert "in sorted order" in dataset.notes[0]


NO_IMAGES = r"no images in .*<class>/<name>\.jpg"
STRANGE = (
    "are no classes of tiny, as a, b.*it has 3: mostly blue, mostly green, mostly red.*"
    "for names by id add the set again: tandem models add --class-ids"
)
SORTED = r"3 labels are no classes.*it has 3: n03, n01, n02.* as the set does$"  # not guessed


@pytest.mark.parametrize(
    ("of_set", "files", "says"),
    [
        (BY_LABEL, ("a/a.jpg", "b/a.jpg"), STRANGE),  # one too few
        (BY_LABEL, ("a/a.jpg", "b/a.jpg", "c/a.jpg", "d/a.jpg"), STRANGE),
        (BY_LABEL, ("a/a.jpg", "b/a.jpg", "mostly red/a.jpg"), STRANGE),  # one is a class by name
        (BY_ID, ("a/a.jpg", "b/a.jpg", "c/a.jpg"), SORTED),
        (BY_LABEL, (*EVERY, "pink/a.jpg"), "1 labels are no classes of tiny, as pink;"),
        (BY_ID, ("n01/a.jpg", "mostly red/a.jpg"), "more than one way, as mostly red, n01"),
        (CRANES, ("crane/a.jpg", "duck/a.jpg"), "crane is the name of 2 classes .*numbers 0, 2"),
        (BY_LABEL, (), NO_IMAGES),
        (BY_LABEL, ("a.jpg",), NO_IMAGES),
        (BY_LABEL, ("mostly red/a.txt",), NO_IMAGES),
        (BY_LABEL, (".hidden/a.jpg",), NO_IMAGES),
        (BY_LABEL, None, "images is neither a folder nor a list"),
    ],
)
def test_folders_that_are_refused(tmp_path, of_set, files, says):
    labels, ids = of_set
    model_set = with_names(tmp_path / "set", labels, **({"ids": ids} if ids else {}))
    if files is not None:
        (tmp_path / "images").mkdir()
        touch(tmp_path / "images", *files)
    with pytest.raises(ModelSetError, match=says):
        read_dataset(tmp_path / "images", model_set)


def test_with_ids_or_numbers_two_classes_may_share_a_label(tmp_path):
    model_set = with_names(tmp_path / "set", ("crane", "duck", "crane"), ids=IDS)
    source = touch(tmp_path / "images", "n01/a.jpg", "n02/a.jpg", "n03/a.jpg")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [0, 1, 2]
    numbers = listed(tmp_path, "images/n03/a.jpg,2\nimages/n01/a.jpg,0\n")
    assert [i.class_index for i in read_dataset(numbers, model_set).images] == [0, 2]
    labels = listed(tmp_path, "images/n03/a.jpg,crane\n")
    with pytest.raises(ModelSetError, match="Use the class ids instead"):
        read_dataset(labels, model_set)


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


def test_the_name_of_a_dataset_does_not_depend_on_how_it_is_given(tmp_path, by_label, monkeypatch):
    source = touch(tmp_path / "photos" / "val", "mostly red/a.jpg")
    monkeypatch.chdir(source)
    paths = [source, Path(), Path("../val"), Path("mostly red/..")]
    assert {read_dataset(path, by_label).name for path in paths} == {"photos/val"}


def test_a_folder_whose_name_is_not_utf8_gives_a_name_that_can_be_written(tmp_path, by_label):
    source = touch(tmp_path / "photos\udcff", "mostly red/a.jpg")
    name = read_dataset(source, by_label).name
    assert name.encode().endswith(b"/photos?")


@pytest.mark.parametrize("header", ["", "file,label\n", "File, Label\r\n", "\ufefffile,label\n"])
def test_a_list_with_and_without_a_header(tmp_path, by_label, header):
    source = listed(tmp_path, f"{header}b.jpg,mostly red\na.jpg, mostly blue \n\n")
    dataset = read_dataset(source, by_label)
    assert pairs(dataset, tmp_path) == [("a.jpg", 0), ("b.jpg", 2)]
    assert dataset.name == f"{tmp_path.name}/list.csv"
    assert dataset.notes == ("no images of 1 classes: mostly green",)


def test_files_are_relative_to_the_list_not_to_where_one_stands(tmp_path, by_label, monkeypatch):
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path)
    text = f"../images/a.jpg,mostly red\n{tmp_path}/b.jpg,mostly red\n"
    dataset = read_dataset(listed(tmp_path / "lists", text), by_label)
    resolved = {image.path.resolve() for image in dataset.images}
    assert resolved == {tmp_path / "images" / "a.jpg", tmp_path / "b.jpg"}


@pytest.mark.parametrize("labels", [("2", "0"), ("n02", "n03"), ("mostly red", "mostly blue")])
def test_a_list_names_classes_by_number_id_or_label(tmp_path, by_id, labels):
    source = listed(tmp_path, f"a.jpg,{labels[0]}\nb.jpg,{labels[1]}\n")
    assert [i.class_index for i in read_dataset(source, by_id).images] == [2, 0]


def test_labels_that_are_digits_are_labels_before_they_are_numbers(tmp_path):
    model_set = with_names(tmp_path / "set", ("1", "2", "3"))
    source = listed(tmp_path, "a.jpg,1\nb.jpg,2\n")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [0, 1]


NOT_THREE = "list.csv, line 3: 3 columns; file,label"
NO_LINES = r"list\.csv lists no image; each line is file,label"
NO_TEXT = "is not a UTF-8 text of file,label lines"
NO_CLASS = ("3", "-1", "02", "1.0", "Mostly Red", "")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((f"a.jpg,0\nb.jpg,{n}\n", f"1 labels are no classes of tiny, as {n};") for n in NO_CLASS),
        ("a.jpg,x\nb.jpg,y\nc.jpg,z\n", "3 labels are no classes"),  # never in sorted order
        ("file,label\nb.jpg,1\na.jpg\n", "list.csv, line 3: 1 columns; file,label"),
        ("file,label\nb.jpg,1\na.jpg,0,0.9\n", NOT_THREE),
        ("file,label\nb.jpg,1\na,b.jpg,0\n", NOT_THREE),
        ("", NO_LINES),
        ("\n\n", NO_LINES),
        ("file,label\n", NO_LINES),
        ("größe.jpg,0\n".encode("latin-1"), NO_TEXT),
        (b"\x89PNG\r\n\x1a\n", NO_TEXT),
        (b"x" * 200_000, NO_TEXT),  # a field that is too long
        ("a.jpg,0\n".encode("utf-16-le"), NO_TEXT),
        (b"a\0.jpg,0\n", NO_TEXT),
        ("a.jpg,0\n./a.jpg,1\na.jpg,2\n", r"a\.jpg stands under the labels 0 and 1; an image of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lists_that_are_refused(tmp_path, by_label, content, says):
    with pytest.raises(ModelSetError, match=says):
        read_dataset(listed(tmp_path, content), by_label)


def test_a_comma_in_a_files_name_is_quoted(tmp_path, by_label):
    source = listed(tmp_path, '"a, b.jpg",0\n')
    assert read_dataset(source, by_label).images[0].path == tmp_path / "a, b.jpg"


def test_files_that_are_not_there_are_left_to_the_evaluation(tmp_path, by_label):
    """It lists them as unreadable; one absent file must not stop a list of thousands."""
    dataset = read_dataset(listed(tmp_path, "none.jpg,0\n"), by_label)
    assert pairs(dataset, tmp_path) == [("none.jpg", 0)]


def test_a_file_that_is_listed_twice_counts_once(tmp_path, by_label):
    dataset = read_dataset(listed(tmp_path, "a.jpg,0\nb.jpg,1\na.jpg,0\nc.jpg,2\n"), by_label)
    assert [image.path.name for image in dataset.images] == ["a.jpg", "b.jpg", "c.jpg"]
    assert dataset.notes == ("1 entries name a file that stands before them: it counts once",)


def test_images_are_found_at_any_depth_but_not_in_hidden_folders(tmp_path):
    touch(tmp_path, "b.jpg", "a/c.PNG", "a/b/d.webp", "e.txt", ".trash/f.jpg", "a/.cache/b/g.jpg")
    (tmp_path / "h.jpg").mkdir()
    paths = [str(path.relative_to(tmp_path)) for path in find_images(tmp_path)]
    assert paths == ["a/b/d.webp", "a/c.PNG", "b.jpg"]


def test_images_of_classes_that_are_links_are_found(tmp_path):
    touch(tmp_path / "store", "cat/a.jpg", "dog/b.jfif", "dog/._b.jpg", "__MACOSX/c.jpg")
    folder = tmp_path / "classes"
    folder.mkdir()
    for name in ("cat", "dog", "__MACOSX"):
        (folder / name).symlink_to(tmp_path / "store" / name)
    paths = [str(path.relative_to(folder)) for path in find_images(folder)]
    assert paths == ["cat/a.jpg", "dog/b.jfif"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("", r"no images in .*: expected \.jpg"), ("a.txt", "is not a folder; give one with images")],
)
def test_where_no_images_are(tmp_path, name, says):
    with pytest.raises(ModelSetError, match=says):
        find_images(touch(tmp_path, "a.txt") / name)


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return load_model_set(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


def test_a_list_of_files_and_their_labels(tmp_path, scored_set):
    dataset = read_label_sets(write_scored_images(tmp_path / "x", 2), scored_set)
    assert [(image.path.name, image.classes) for image in dataset.images] == [
        ("black0.png", ()),
        ("black1.png", ()),
        ("cyan0.png", (0, 1)),
        ("cyan1.png", (0, 1)),
        ("red0.png", (2,)),
        ("red1.png", (2,)),
        ("white0.png", (0, 1, 2)),
        ("white1.png", (0, 1, 2)),
    ]
    assert dataset.notes == ()
    assert all(image.path.is_file() for image in dataset.images)
    expected = np.array([[0, 0, 0]] * 2 + [[1, 1, 0]] * 2 + [[0, 0, 1]] * 2 + [[1, 1, 1]] * 2)
    np.testing.assert_array_equal(label_truth_of(list(dataset.images), 3), expected)


def test_labels_by_number_with_spaces_and_twice(tmp_path, scored_set):
    dataset = read_label_sets(listed(tmp_path, "b.png, 2 ; 0;2\na.png,;\n"), scored_set)
    assert [image.classes for image in dataset.images] == [(), (0, 2)]
    assert dataset.notes == ("no images of 1 classes: has green; not in the means",)


def test_folders_give_each_image_one_label(tmp_path, scored_set):
    for label in scored_set.labels[:2]:
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.png").write_bytes(b"")
    dataset = read_label_sets(tmp_path, scored_set)
    assert [image.classes for image in dataset.images] == [(0,), (1,)]


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
