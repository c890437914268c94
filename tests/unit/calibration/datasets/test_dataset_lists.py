"""A list of files and labels: what its lines may say, and what is refused how."""

import pytest

from calibration.datasets.labelled import read_dataset
from models.errors import ModelSetError
from tests.support.calibration.labelled_files import listed, pairs, with_names


@pytest.mark.parametrize("header", ["", "file,label\n", "File, Label\r\n", "\ufefffile,label\n"])
def test_a_list_with_and_without_a_header(tmp_path, by_label, header):
    source = listed(tmp_path, f"{header}b.jpg,mostly red\na.jpg, mostly blue \n\n")
    found = read_dataset(source, by_label)
    assert pairs(found, tmp_path) == [("a.jpg", 0), ("b.jpg", 2)]
    assert found.name == f"{tmp_path.name}/list.csv"
    assert found.notes == ("no images of 1 classes: mostly green",)


def test_files_are_relative_to_the_list_not_to_where_one_stands(tmp_path, by_label, monkeypatch):
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path)
    text = f"../images/a.jpg,mostly red\n{tmp_path}/b.jpg,mostly red\n"
    found = read_dataset(listed(tmp_path / "lists", text), by_label)
    resolved = {image.path.resolve() for image in found.images}
    assert resolved == {tmp_path / "images" / "a.jpg", tmp_path / "b.jpg"}


@pytest.mark.parametrize("labels", [("2", "0"), ("n02", "n03"), ("mostly red", "mostly blue")])
def test_a_list_names_classes_by_number_id_or_label(tmp_path, by_id, labels):
    source = listed(tmp_path, f"a.jpg,{labels[0]}\nb.jpg,{labels[1]}\n")
    assert [i.class_index for i in read_dataset(source, by_id).images] == [2, 0]


def test_labels_that_are_digits_are_labels_before_they_are_numbers(tmp_path):
    model_set = with_names(tmp_path / "set", ("1", "2", "3"))
    source = listed(tmp_path, "a.jpg,1\nb.jpg,2\n")
    assert [i.class_index for i in read_dataset(source, model_set).images] == [0, 1]


@pytest.mark.parametrize("label", ["3", "-1", "02", "1.0", "Mostly Red", ""])
def test_what_names_no_class_in_a_list_is_refused(tmp_path, by_label, label):
    source = listed(tmp_path, f"a.jpg,0\nb.jpg,{label}\n")
    with pytest.raises(ModelSetError, match=f"1 labels are no classes of tiny, as {label};"):
        read_dataset(source, by_label)


def test_a_list_is_never_taken_in_sorted_order(tmp_path, by_label):
    source = listed(tmp_path, "a.jpg,x\nb.jpg,y\nc.jpg,z\n")
    with pytest.raises(ModelSetError, match="3 labels are no classes"):
        read_dataset(source, by_label)


@pytest.mark.parametrize(("line", "columns"), [("a.jpg", 1), ("a.jpg,0,0.9", 3), ("a,b.jpg,0", 3)])
def test_a_line_with_other_columns_is_named(tmp_path, by_label, line, columns):
    source = listed(tmp_path, f"file,label\nb.jpg,1\n{line}\n")
    with pytest.raises(ModelSetError, match=f"list.csv, line 3: {columns} columns; file,label"):
        read_dataset(source, by_label)


def test_a_comma_in_a_files_name_is_quoted(tmp_path, by_label):
    source = listed(tmp_path, '"a, b.jpg",0\n')
    assert read_dataset(source, by_label).images[0].path == tmp_path / "a, b.jpg"


@pytest.mark.parametrize("text", ["", "\n\n", "file,label\n"])
def test_a_list_without_images_is_refused(tmp_path, by_label, text):
    with pytest.raises(ModelSetError, match=r"list\.csv lists no image; each line is file,label"):
        read_dataset(listed(tmp_path, text), by_label)


@pytest.mark.parametrize(
    "content",
    [
        "größe.jpg,0\n".encode("latin-1"),
        b"\x89PNG\r\n\x1a\n",
        b"x" * 200_000,
        "a.jpg,0\n".encode("utf-16-le"),
        b"a\0.jpg,0\n",
    ],
    ids=["latin-1", "image", "field too long", "utf-16", "nul"],
)
def test_a_file_that_is_no_list_is_refused(tmp_path, by_label, content):
    with pytest.raises(ModelSetError, match="is not a UTF-8 text of file,label lines"):
        read_dataset(listed(tmp_path, content), by_label)


def test_files_that_are_not_there_are_left_to_the_evaluation(tmp_path, by_label):
    """It lists them as unreadable; one absent file must not stop a list of thousands."""
    found = read_dataset(listed(tmp_path, "none.jpg,0\n"), by_label)
    assert pairs(found, tmp_path) == [("none.jpg", 0)]


def test_a_file_under_two_labels_is_refused(tmp_path, by_label):
    source = listed(tmp_path, "a.jpg,0\n./a.jpg,1\na.jpg,2\n")
    with pytest.raises(ModelSetError, match=r"a\.jpg stands under the labels 0 and 1; an image of"):
        read_dataset(source, by_label)


def test_a_file_that_is_listed_twice_counts_once(tmp_path, by_label):
    found = read_dataset(listed(tmp_path, "a.jpg,0\nb.jpg,1\na.jpg,0\nc.jpg,2\n"), by_label)
    assert [image.path.name for image in found.images] == ["a.jpg", "b.jpg", "c.jpg"]
    assert found.notes == ("1 entries name a file that stands before them: it counts once",)
