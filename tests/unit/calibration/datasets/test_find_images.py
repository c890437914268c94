"""Images without labels, wherever they are in a folder."""

import pytest

from calibration.datasets.labelled import find_images
from models.errors import ModelSetError
from tests.support.calibration.labelled_files import touch


def test_images_are_found_at_any_depth_but_not_in_hidden_folders(tmp_path):
    touch(tmp_path, "b.jpg", "a/c.PNG", "a/b/d.webp", "e.txt", ".trash/f.jpg", "a/.cache/b/g.jpg")
    (tmp_path / "h.jpg").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in find_images(tmp_path)]
    assert found == ["a/b/d.webp", "a/c.PNG", "b.jpg"]


def test_images_of_classes_that_are_links_are_found(tmp_path):
    touch(tmp_path / "store", "cat/a.jpg", "dog/b.jfif", "dog/._b.jpg", "__MACOSX/c.jpg")
    folder = tmp_path / "classes"
    folder.mkdir()
    for name in ("cat", "dog", "__MACOSX"):
        (folder / name).symlink_to(tmp_path / "store" / name)
    found = [str(path.relative_to(folder)) for path in find_images(folder)]
    assert found == ["cat/a.jpg", "dog/b.jfif"]


def test_a_folder_without_images_to_find_is_refused(tmp_path):
    with pytest.raises(ModelSetError, match=r"no images in .*: expected \.jpg"):
        find_images(touch(tmp_path, "a.txt"))


def test_a_file_is_no_folder_to_find_images_in(tmp_path):
    with pytest.raises(ModelSetError, match="is not a folder; give one with images"):
        find_images(touch(tmp_path, "a.jpg") / "a.jpg")
