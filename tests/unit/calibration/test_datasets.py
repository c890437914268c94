"""Datasets: folders per class, lists of files and labels, images with any number of labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.datasets import (
    Dataset,
    LabelledImage,
    find_images,
    label_truth_of,
    read_dataset,
    read_label_sets,
)
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import ModelSet, load_model_set
from models.record import FileRecord
from tests.support.cases import cases
from tests.support.scored_sets import write_scored_images, write_scored_set
from tests.support.tiny_networks import LABELS, write_pictures, write_tiny_set

IDS = ("n01", "n02", "n03")


def with_names(folder, labels=LABELS, ids=None):
    """Return a tiny set whose classes have these names."""
    folder.mkdir()
    facts: dict[str, Any] = {"num_classes": len(labels)}
    for what, names in (("labels", labels), ("class_ids", ids)):
        if names is not None:
            (folder / f"{what}.names").write_text("\n".join(names), "utf-8")
            facts[what] = FileRecord.of(folder, f"{what}.names")
    write_tiny_set(folder, gains={"only": 4.0}, **facts)
    return ModelSet(folder, read_manifest(folder))


def touch(folder: Path, *paths: str) -> Path:
    """Make empty files; only their names are read here."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


def listed(folder: Path, text: str | bytes, name: str = "list.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def pairs(found: Dataset, below: Path) -> list[tuple[str, int]]:
    return [(str(i.path.relative_to(below)), i.class_index) for i in found.images]


NO_IMAGES = r"no images in .*<class>/<name>\.jpg"
STRANGE = (
    "are no classes of tiny, as a, b.*it has 3: mostly blue, mostly green, mostly red.*"
    "for names by id give --class-ids FILE, or the set: tandem models labels .*--class-ids FILE"
)
SORTED = r"3 labels are no classes.*it has 3: n03, n01, n02.* as the set does$"  # not guessed
NOT_THREE = "list.csv, line 3: 3 columns; file,label"
NO_LINES = r"list\.csv lists no image; each line is file,label"
NO_TEXT = "is not a UTF-8 text of file,label lines"
NO_CLASS = ("3", "-1", "1.0", "Mostly Red", "")


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
    assert (dataset.name, dataset.notes) == ("colours/eval", ())
    assert pairs(dataset, source) == [
        (f"{label}/{number}.png", index) for index, label in enumerate(LABELS) for number in (0, 1)
    ]
    assert dataset.images[0] == LabelledImage(source / "mostly blue" / "0.png", 0)


BY_LABEL, BY_ID = (LABELS, ()), (LABELS, ("n03", "n01", "n02"))  # labels and ids of sets
CRANES = (("crane", "duck", "crane"), ())  # ImageNet has two classes called crane
EVERY = tuple(f"{label}/a.jpg" for label in LABELS)
NONE_OF_TWO = ("no images of 2 classes: mostly blue, mostly red",)
NO_BLUE = ("no images of 1 classes: mostly blue",)


@cases(
    "of_set, files, indices, notes",
    (BY_ID, ("n01/a.jpg", "n02/a.jpg", "n03/a.jpg"), [1, 2, 0], ()),  # in the set's order
    (BY_ID, EVERY, [0, 1, 2], ()),  # labels, though the set has ids
    ((("a", "b", "c"), ("c", "a", "b")), ("a/x.jpg", "b/x.jpg"), [1, 2], None),  # ids first
    (BY_LABEL, ("mostly green/a.jpg",), [1], NONE_OF_TWO),
    (BY_LABEL, (*EVERY[1:], "mostly blue/notes.txt"), [1, 2], NO_BLUE),
    (BY_LABEL, (*EVERY, ".ipynb_checkpoints/a.jpg", ".git/b.png"), [0, 1, 2], ()),
    (CRANES, ("duck/a.jpg",), [1], None),  # another label of two classes is not used
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
    (note,) = read_dataset(touch(tmp_path / "images", "class 039/a.jpg"), model_set).notes
    assert note.startswith("no images of 39 classes: class 000, class 001")
    assert "class 004, ... (39 in all)" in note


TWELVE = tuple(f"colour {letter}" for letter in "abcdefghijkl")
PADDED = tuple(f"{k:02}" for k in range(12))
COUNT = tuple(map(str, range(12)))
FROM_1 = tuple(map(str, range(1, 13)))


@cases(
    "names, folders, indices",
    (TWELVE, COUNT, range(12)),  # as text 10 would be class 2
    (TWELVE, ("0", "10", "3"), [0, 10, 3]),
    (TWELVE, PADDED, range(12)),
    (TWELVE, ("07", "11"), [7, 11]),
    (TWELVE, PADDED[1:], range(1, 12)),
    (TWELVE[:9], FROM_1[:9], range(9)),  # no number of the first nine means anything else
    (TWELVE, (*PADDED[1:], "12"), range(12)),
    (COUNT, COUNT, range(12)),
    (COUNT, PADDED, range(12)),
    (sorted(COUNT), COUNT, [sorted(COUNT).index(name) for name in COUNT]),  # labels say it
    (FROM_1, ("2", "10"), [1, 9]),
    (("10", "7", "4 o'clock"), ("7", "4 o'clock"), [1, 2]),
    (TWELVE, ("\u0667", "2"), [7, 2]),
)
def test_folders_of_class_numbers(tmp_path, names, folders, indices):
    model_set = with_names(tmp_path / "set", tuple(names))
    source = touch(tmp_path / "images", *(f"{name}/a.jpg" for name in (*folders, ".3", "__MACOSX")))
    found = {i.path.parent.name: i.class_index for i in read_dataset(source, model_set).images}
    assert found == dict(zip(folders, indices, strict=True))
    text = "".join(f"{name}/a.jpg,{name}\n" for name in folders)
    if len(folders) < 9 or folders in (COUNT, PADDED):  # a list is never taken in sorted order
        images = read_dataset(listed(source, text), model_set).images
        assert {i.path.parent.name: i.class_index for i in images} == found


@cases(
    "names, folders, says",
    (
        TWELVE,
        FROM_1,
        r"folder 10 is: in sorted order it is class 1 of tiny \(colour b\), counted by "
        "number class 9. Name the folders as the labels, or as class numbers from 0 to 11",
    ),
    (TWELVE, tuple(f"class_{k}" for k in range(12)), "class_10 is: in sorted order it is class 2"),
    (TWELVE, tuple(f"{k} o'clock" for k in FROM_1), "nothing tells which class the folder 10 o'c"),
    (TWELVE[:5], ("0", "1", "2", "3", "5"), "folder 5 is: in sorted order it is class 4 of tiny"),
    (TWELVE[:3], ("-1", "0", "1"), "nothing tells"),
    (TWELVE, ("3", "12"), "1 labels are no classes of tiny, as 12;"),
    (TWELVE, ("3", "-1", "1.0"), "2 labels are no classes of tiny, as -1, 1.0;"),
    (TWELVE, ("3", "colour b"), "more than one way, as 3, colour b"),
    (("5", "7", "9"), ("1", "2"), "2 labels are no classes"),  # these labels are not counted
    (("1", "two", "three"), ("0", "1"), "more than one way"),
)
def test_folders_whose_numbers_can_be_read_in_two_ways(tmp_path, names, folders, says):
    model_set = with_names(tmp_path / "set", names)
    with pytest.raises(ModelSetError, match=says):
        read_dataset(touch(tmp_path / "images", *(f"{n}/a.jpg" for n in folders)), model_set)


def test_numbers_that_could_be_read_otherwise_are_noted(tmp_path):
    images = touch(tmp_path / "images", *(f"{name}/a.jpg" for name in COUNT))
    (note,) = read_dataset(images, with_names(tmp_path / "named", TWELVE)).notes
    assert note.startswith("folder names are class numbers: a network trained on these folders")
    ids = with_names(tmp_path / "ids", TWELVE, ids=sorted(COUNT))
    (note,) = read_dataset(images, ids).notes
    assert note == "names are the set's ids, which are numbers, and not class numbers"
    assert read_dataset(images, ids).images[3].class_index == 3  # "11"


def test_strange_folders_are_taken_in_sorted_order_and_that_is_noted(tmp_path, by_label):
    source = touch(tmp_path, "c/a.jpg", "a/a.jpg", "b/a.jpg")
    dataset = read_dataset(source, by_label)
    assert pairs(dataset, source) == [("a/a.jpg", 0), ("b/a.jpg", 1), ("c/a.jpg", 2)]
    assert len(dataset.notes) == 1
    assert "in sorted order" in dataset.notes[0]


@cases(
    "of_set, files, says",
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


def test_a_datasets_name_is_the_same_however_given_and_can_be_written(
    tmp_path, by_label, monkeypatch
):
    source = touch(tmp_path / "photos" / "val", "mostly red/a.jpg")
    monkeypatch.chdir(source)
    paths = [source, Path(), Path("../val"), Path("mostly red/..")]
    assert {read_dataset(path, by_label).name for path in paths} == {"photos/val"}
    name = read_dataset(touch(tmp_path / "photos\udcff", "mostly red/a.jpg"), by_label).name
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


def test_ids_of_a_file_stand_for_the_sets_own(tmp_path, by_id):
    source = touch(tmp_path / "images", "w3/a.jpg", "w1/b.jpg")
    found = read_dataset(source, by_id, ("w1", "w2", "w3"))
    assert [i.class_index for i in found.images] == [0, 2]
    with pytest.raises(ModelSetError, match="labels are no classes of tiny, as w1, w3; it has 3"):
        read_dataset(source, by_id)


def test_labels_that_are_digits_are_labels_before_they_are_numbers(tmp_path):
    model_set = with_names(tmp_path / "set", ("1", "2", "3"))
    source = listed(tmp_path, "a.jpg,1\nb.jpg,2\n")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [0, 1]


@cases(
    "content, says",
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
    ids=lambda value: str(value)[:40],
)
def test_lists_that_are_refused(tmp_path, by_label, content, says):
    with pytest.raises(ModelSetError, match=says):
        read_dataset(listed(tmp_path, content), by_label)


def test_a_list_may_quote_commas_and_name_what_is_absent_or_twice(tmp_path, by_label):
    source = listed(tmp_path, '"a, b.jpg",0\n')
    assert read_dataset(source, by_label).images[0].path == tmp_path / "a, b.jpg"
    # It lists them as unreadable; one absent file must not stop a list of thousands.
    dataset = read_dataset(listed(tmp_path, "none.jpg,0\n"), by_label)
    assert pairs(dataset, tmp_path) == [("none.jpg", 0)]
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


def test_label_sets_by_a_list_of_numbers_and_by_folders(tmp_path, scored_set):
    dataset = read_label_sets(listed(tmp_path, "b.png, 2 ; 0;2\na.png,;\n"), scored_set)
    assert [image.classes for image in dataset.images] == [(), (0, 2)]
    assert dataset.notes == ("no images of 1 classes: has green; not in the means",)
    for label in scored_set.labels[:2]:
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.png").write_bytes(b"")
    dataset = read_label_sets(tmp_path, scored_set)
    assert [image.classes for image in dataset.images] == [(0,), (1,)]


@cases(
    "text, says",
    ("a.png,\nb.png,;\n", "no image has a label; each line is file,labels"),
    ("a.png,has blue;has yellow\n", "1 labels are no classes of scored, as has yellow"),
    ("a.png,has blue;1\n", "names classes in more than one way"),
    ("a.png,0\nb.png,1\na.png,1\n", r"lists 1 files twice, as .*a\.png.*with ; between"),
    ("a.png\n", "1 columns; file,label"),
    ("", "lists no image"),
)
def test_a_list_that_is_none(tmp_path, scored_set, text, says):
    with pytest.raises(ModelSetError, match=says):
        read_label_sets(listed(tmp_path, text), scored_set)
