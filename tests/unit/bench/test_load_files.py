"""Image files are found by path, folder and glob, each once and in order."""

from pathlib import Path

import pytest

from app.bench.load import NothingToClassifyError, find_files
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


@pytest.mark.parametrize("name", ["e.jfif", "e.JPE", "e.jpeg", "e.WebP"])
def test_every_suffix_of_the_three_formats(folder, name):
    (folder / "sub" / "deep" / name).touch()
    assert f"sub/deep/{name}" in [str(path) for path in find_files(["sub"])]


@pytest.mark.parametrize("name", ["._b.jpg", ".b.jpg", "__MACOSX/b.jpg", ".cache/b.jpg"])
def test_hidden_files_and_those_of_macos_are_left_out(folder, name):
    hidden = folder / "sub" / name
    hidden.parent.mkdir(exist_ok=True)
    hidden.touch()
    assert [path.name for path in find_files(["sub"])] == ["c.webp", "d.jpeg"]
    assert list(find_files([f"sub/{name}"])) == [Path("sub") / name]  # named: taken


def test_a_folder_that_is_a_link_is_followed(folder):
    (folder / "links").mkdir()
    (folder / "links" / "class").symlink_to(folder / "sub")
    assert [str(path) for path in find_files(["links"])] == [
        "links/class/c.webp",
        "links/class/deep/d.jpeg",
    ]


def test_a_link_to_a_folder_above_is_no_endless_walk(folder):
    (folder / "sub" / "deep" / "up").symlink_to(folder / "sub")
    (folder / "sub" / "self").symlink_to(folder / "sub" / "self")
    assert [path.name for path in find_files(["sub"])] == ["c.webp", "d.jpeg"]


def test_an_absolute_glob(folder):
    assert list(find_files([f"{folder}/*.jpg"])) == [folder / "b.jpg", folder / "odd[1].jpg"]


@pytest.mark.parametrize("path", ["missing.jpg", "*.gif", "empty"])
def test_nothing_found_is_said(folder, path):
    (folder / "empty").mkdir()
    with pytest.raises(NothingToClassifyError, match=path.replace("*", r"\*")):
        list(find_files([path]))
