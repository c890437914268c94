"""What is learned from, and what is left out with a word."""

import shutil

import pytest

from calibration.learning.photographs import (
    Found,
    Photograph,
    as_text,
    check_names,
    classes_of,
    joined,
    read_photographs,
    without_single,
)
from models.errors import ModelSetError
from tests.support.calibration.noisy_pictures import write_noisy


def labels_of(found):
    return sorted({photograph.label for photograph in found.photographs})


def test_folders_and_lists_name_the_same_photographs(photographs, tmp_path):
    by_folder = read_photographs([photographs])
    rows = [f"{p.path},{p.label}" for p in by_folder.photographs]
    (listed := tmp_path / "list.csv").write_text("\n".join(rows), "utf-8")
    by_list = read_photographs([listed])
    assert {(p.sha256, p.label) for p in by_list.photographs} == {
        (p.sha256, p.label) for p in by_folder.photographs
    }
    assert len(by_folder.photographs) == 36
    assert not by_folder.notes


def test_the_same_photograph_in_two_classes_is_left_out_of_both(photographs):
    shutil.copy(photographs / "blue" / "0-1.png", photographs / "red" / "again.png")
    found = read_photographs([photographs])
    assert len(found.photographs) == 35
    assert "1 photographs are in two classes, and are left out of both" in found.notes[0]
    assert "blue and red" in found.notes[0]


def test_a_copy_in_its_class_counts_once(photographs):
    shutil.copy(photographs / "blue" / "0-1.png", photographs / "blue" / "again.png")
    found = read_photographs([photographs])
    assert len(found.photographs) == 36
    assert "1 files are copies" in found.notes[0]


@pytest.mark.parametrize("other", ["Blue", "BLUE"])
def test_names_that_differ_in_case_alone_are_refused(photographs, other):
    write_noisy(photographs, 2, 1, (other,))
    with pytest.raises(ModelSetError, match="differ in case alone: rename one"):
        read_photographs([photographs])


def test_accents_are_one_name_however_they_are_written():
    with pytest.raises(ModelSetError, match="differ in case alone"):
        check_names(["Caf\u00e9", "caf\u00e9"])


def test_a_folder_too_deep_is_refused_and_the_right_one_named(photographs, tmp_path):
    (above := tmp_path / "above").mkdir()
    photographs.rename(above / "inner")
    with pytest.raises(ModelSetError, match="photographs lie deeper than") as caught:
        read_photographs([above])
    assert str(above / "inner") in caught.value.message


def test_a_folder_of_photographs_without_classes_is_refused(photographs):
    with pytest.raises(ModelSetError, match="no folders of classes"):
        read_photographs([photographs / "blue"])


def test_folders_in_a_class_and_files_beside_the_classes_are_left_out(photographs):
    shutil.copytree(photographs / "blue", photographs / "green" / "more")
    shutil.copy(photographs / "blue" / "0-1.png", photographs / "beside.png")
    (photographs / "empty").mkdir()
    found = read_photographs([photographs])
    assert len(found.photographs) == 36
    assert found.notes[0] == "1 folders without photographs in them: empty"
    assert found.notes[1].startswith("13 photographs are left out")


def test_what_is_no_folder_and_no_list_is_refused(tmp_path):
    with pytest.raises(ModelSetError, match="neither a folder nor a list"):
        read_photographs([tmp_path / "absent"])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelSetError, match="no images in"):
        read_photographs([tmp_path / "nothing"])


def test_a_listed_file_that_is_absent_is_named_and_counted(photographs, tmp_path):
    rows = [f"{p.path},{p.label}" for p in read_photographs([photographs]).photographs]
    (listed := tmp_path / "list.csv").write_text("\n".join([*rows, "absent.png,blue"]), "utf-8")
    found = read_photographs([listed])
    assert len(found.photographs) == 36
    assert "1 files cannot be read" in found.notes[0]
    assert "absent.png" in found.notes[0]


def test_others_of_any_depth_are_of_the_class_none(photographs, tmp_path):
    write_noisy(tmp_path / "others" / "deep", 2, 3)
    assert labels_of(read_photographs([photographs], tmp_path / "others")) == [
        *("blue", "green", "none", "red")
    ]
    write_noisy(photographs, 2, 4, ("None",))
    assert "None" in labels_of(read_photographs([photographs], tmp_path / "others"))


def photograph(sha256, label):
    return Photograph(sha256, label, f"{label}/{sha256}")


def test_classes_of_one_photograph_are_left_out_with_a_word():
    of = [photograph("a", "x"), photograph("b", "x"), photograph("c", "y"), photograph("d", "y")]
    notes: list[str] = []
    assert without_single([*of, photograph("e", "z")], notes) == of
    assert notes == ["1 classes of one photograph are left out: z"]


@pytest.mark.parametrize("labels", ["", "x", "xx", "xxy"])
def test_fewer_than_two_classes_are_refused(labels):
    of = [photograph(str(place), label) for place, label in enumerate(labels)]
    with pytest.raises(ModelSetError, match="two classes or more are needed"):
        without_single(of, [])


def test_later_photographs_are_added_and_correct_classes():
    before = [photograph("a", "x"), photograph("b", "y")]
    found = Found([photograph("b", "x"), photograph("c", "w")])
    photographs = joined(before, found)
    assert [(p.sha256, p.label) for p in photographs] == [("a", "x"), ("b", "x"), ("c", "w")]
    assert found.notes == ["1 photographs change their class: y/b (now x)"]
    assert classes_of(photographs, ("x", "y")) == ("x", "w")


def test_a_new_class_may_not_differ_from_an_earlier_one_in_case():
    with pytest.raises(ModelSetError, match="differ in case alone"):
        joined([photograph("a", "x")], Found([photograph("b", "X")]))


def test_names_with_commas_and_quotes_are_kept():
    assert as_text([photograph("a", 'x, "y"')]).splitlines() == [
        "sha256,label,name",
        'a,"x, ""y""","x, ""y""/a"',
    ]
