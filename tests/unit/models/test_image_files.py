"""Image files are found by path, folder and glob, each once and in order."""

from pathlib import Path

import pytest

from models.image_files import NothingToClassifyError, find_files
from tests.support.image_folder import write_image_folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with pictures and other things."""
    monkeypatch.chdir(tmp_path)
    return write_image_folder(tmp_path)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["b.jpg"], ["b.jpg"]),
        (["notes.txt"], ["notes.txt"]),  # named: sent as it is, the service judges
        (["sub"], ["sub/c.webp", "sub/deep/d.jpeg"]),
        (["."], ["a.PNG", "b.jpg", "odd[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]),
        (["*.jpg"], ["b.jpg", "odd[1].jpg"]),
        (["**/*.jpeg"], ["sub/deep/d.jpeg"]),
        (["odd[1].jpg"], ["odd[1].jpg"]),  # the file itself before the glob
        (["b.jpg", "b.jpg", "*.jpg", "sub", "sub/c.webp"], None),
    ],
)
def test_files_are_found_once_and_in_order(paths, expected):
    found = [str(path) for path in find_files(paths)]
    expected = expected or ["b.jpg", "odd[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]
    assert found == expected


def test_a_folder_whose_name_ends_like_a_picture_is_no_picture(folder):
    (folder / "sub" / "album.jpg").mkdir()
    assert [p.name for p in find_files(["sub"])] == ["c.webp", "d.jpeg"]


def test_an_absolute_glob(folder):
    assert list(find_files([f"{folder}/*.jpg"])) == [folder / "b.jpg", folder / "odd[1].jpg"]


@pytest.mark.parametrize("path", ["missing.jpg", "*.gif", "empty"])
def test_nothing_found_is_said(folder, path):
    (folder / "empty").mkdir()
    with pytest.raises(NothingToClassifyError, match=path.replace("*", r"\*")):
        list(find_files([path]))
