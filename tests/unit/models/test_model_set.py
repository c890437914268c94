"""Finding, loading and verifying sets on disk."""

import shutil
from pathlib import Path

import pytest
import yaml

from models.errors import ModelSetError
from models.model_set import ModelSet, list_folders, load_model_set
from models.record import FileRecord
from tests.support.tiny_networks import LABELS, write_tiny_set


@pytest.fixture
def folder(tiny_set, tmp_path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))


@pytest.fixture
def loaded(folder) -> ModelSet:
    return load_model_set(str(folder))


def test_a_set_is_found_by_name_and_by_path(folder, monkeypatch):
    search = (folder.parent,)
    by_name = load_model_set("tiny", search)
    assert (by_name.name, by_name.labels) == ("tiny", LABELS)
    monkeypatch.chdir(folder.parent.parent)
    for path in (str(folder), "sets/tiny", "./sets/tiny/"):
        assert load_model_set(path).fingerprint() == by_name.fingerprint()
    assert (by_name, list_folders(search)) == (load_model_set(str(folder)), [folder])


def test_the_first_folder_that_has_it_wins(folder, tmp_path):
    other = write_tiny_set(tmp_path / "first" / "tiny", gains={"other": 1.0})
    first = load_model_set("tiny", (other.parent, folder.parent))
    assert [member.name for member in first.manifest.members] == ["other"]


def test_a_set_that_is_not_there_names_the_places_and_what_there_is(folder):
    with pytest.raises(ModelSetError) as caught:
        load_model_set("tyni", (folder.parent,))
    assert str(folder.parent / "tyni") in caught.value.message
    assert "sets found: tiny" in caught.value.message
    with pytest.raises(ModelSetError, match="sets found: none"):
        load_model_set("tiny", (folder / "nowhere",))


def test_a_whole_set_has_no_problems_and_no_other_members(loaded):
    assert (loaded.problems(), loaded.network_path("sure")) == ([], loaded.folder / "sure.xml")
    with pytest.raises(ModelSetError, match="no member 'resnet50'; it has: sure, unsure"):
        loaded.network_path("resnet50")


@pytest.mark.parametrize("suffix", ["xml", "bin"])
def test_an_altered_network_is_not_given_out(loaded, suffix):
    with (loaded.folder / f"sure.{suffix}").open("ab") as file:
        file.write(b" ")
    (problem,) = loaded.problems()
    assert f"sure.{suffix} was altered" in problem
    assert loaded.network_path("unsure")
    with pytest.raises(ModelSetError, match="was altered"):
        loaded.network_path("sure")


def test_every_missing_file_is_named(loaded):
    (loaded.folder / "sure.bin").unlink()
    (loaded.folder / "labels.txt").unlink()
    problems = " ".join(loaded.problems())
    assert "sure.bin is missing" in problems
    assert "labels.txt is missing" in problems


def with_labels(folder: Path, data: bytes) -> ModelSet:
    """Return the set with other labels, which its manifest knows of."""
    (folder / "labels.txt").write_bytes(data)
    content = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    content["labels"] = FileRecord.of(folder, "labels.txt").model_dump()
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return load_model_set(str(folder))


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (b"a\r\nb\r\nc", ("a", "b", "c")),
        (b"a \n\n b\nc\n\n", ("a", "b", "c")),
        (  # a byte order mark, and separators of Unicode
            b"\xef\xbb\xbf" + "cat\ntwo\u2028parts\na\x0cb\n".encode(),
            ("cat", "two\u2028parts", "a\x0cb"),
        ),
    ],
)
def test_line_ends_and_empty_lines_do_not_matter(folder, data, labels):
    assert with_labels(folder, data).labels == labels


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"blue\ngreen\n", "has 2 labels, the manifest says num_classes: 3"),
        (b"a\nb\n\xff\n", "not UTF-8"),
    ],
)
def test_labels_too_few_or_not_in_utf8(folder, data, says):
    spoilt = with_labels(folder, data)
    (problem,) = spoilt.problems()
    assert says in problem
    with pytest.raises(ModelSetError, match=says):
        _ = spoilt.labels


def test_a_command_names_a_set_as_it_can_be_found(tmp_path, monkeypatch):
    assert load_model_set("imagenette").argument == "imagenette"
    folder = write_tiny_set(tmp_path / "own sets" / "tandem" / "models" / "imagenette")
    assert load_model_set(str(folder)).argument == f"'{folder}'"  # by name it is the bundled one
    elsewhere = write_tiny_set(tmp_path / "elsewhere" / "mine")
    monkeypatch.chdir(tmp_path / "elsewhere")
    relative = load_model_set("./mine").argument  # "mine" alone would be a name
    assert (relative, load_model_set(relative).folder) == (str(elsewhere), elsewhere)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own sets"))
    assert load_model_set("imagenette").argument == "imagenette"
    assert load_model_set(str(folder)).argument == "imagenette"
