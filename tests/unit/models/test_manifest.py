"""manifest.yaml, and sets on disk: found, loaded, verified; every mistake has its place."""

import copy
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR, ModelSet, list_folders, load_model_set
from models.network import memory_needed
from models.record import Z95, FileRecord, sha256_of, wilson_interval
from tests.support.cases import cases
from tests.support.tiny_networks import LABELS, with_accuracy, write_tiny_set

BOUNDED = settings(max_examples=100, deadline=None, database=None)


@pytest.fixture
def content(tiny_set) -> dict:
    return yaml.safe_load((tiny_set / "manifest.yaml").read_text("utf-8"))


def read(folder, content):
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return read_manifest(folder)


def changed(content: dict, place: str, value: object) -> dict:
    result = copy.deepcopy(content)
    target = result
    *steps, last = [int(s) if s.isdigit() else s for s in place.split(".")]
    for step in steps:
        target = target[step]
    target[last] = value
    return result


def test_what_was_written_is_read_back_and_bundled_weights_state_their_license(tiny_set, tmp_path):
    manifest = read_manifest(tiny_set)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.yaml"]
    listed = {record.path for record in manifest.files}
    assert listed == {path.name for path in tiny_set.iterdir()} - {"manifest.yaml"}
    for path in BUNDLED_DIR.glob("*/manifest.yaml"):
        manifest = read_manifest(path.parent)
        assert (manifest.name, manifest.license) == (path.parent.name, "Apache-2.0")
        assert "ImageNet" in manifest.training_data
        card = (path.parent / "README.md").read_text("utf-8")
        for said in ("Apache-2.0", "Imagenette", "non-commercial research", "commercial use"):
            assert said in card


@cases("place, value, says", 
        ("colour", "red", "colour: Extra inputs"),
        ("image.resized", 1, "image.resized: Extra inputs"),
        ("image.resize", "fit", "image.resize: Input should be 'crop', 'stretch', "),
        ("image.interpolation", "box", "image.interpolation: Input should be 'bilinear' or"),
        ("members.0.wieght", 2, "members.0.wieght: Extra inputs"),
        ("labels.path", "/etc/passwd", "must be relative to the manifest's folder"),
        ("labels.path", "../labels.txt", "must be relative to the manifest's folder"),
        ("labels.path", "", "'' can be no file's name"),
        ("labels.path", ".", "'.' can be no file's name"),
        ("labels.path", "a\0b", r"'a\x00b' can be no file's name"),
        ("golden", {"path": "\udfff.json", "sha256": "0" * 64}, "can be no file's name"),
        ("members.0.networks.INT8.bin.path", f"{'ä' * 128}.bin", "a name has at most 255 bytes"),
        ("labels.path", "a/" * 500 + "b", "too long for a file system"),
        ("members.0.networks.INT8.bin.path", "a/../../b", "must be relative"),
        ("members.0.networks.INT8.bin.path", "unsure.bin", "bin is 'unsure.bin', but OpenVINO"),
        ("members.0.networks.INT8.bin.path", "copies/sure.bin", "weights of 'sure.xml' from"),
        ("members.0.networks.INT8.xml.path", "sure.ir", "xml must end in .xml"),
        ("labels.sha256", "abc", "labels.sha256"),
        ("schema_version", 2, "schema_version"),
        ("num_classes", 1, "num_classes"),
        ("members", [], "members"),
        ("members.0.name", "Gateway", "members.0.name"),
        ("members.1.name", "sure", "members must have different names"),
        ("members.0.weight", 0, "members.0.weight"),
        ("members.0.weight", float("nan"), "members.0.weight"),
        ("members.0.weight", float("inf"), "members.0.weight"),
        ("members.0.weight", 1e308,
         "members.0.weight: Input should be less than or equal to 1000000"),
        ("members.0.weight", True, "members.0.weight: "),
        ("max_drop", True, "max_drop: Value error, is true, which is no value of this field"),
        ("schema_version", True, "schema_version: Value error, is true"),
        ("image.input_size", True, "image.input_size: Value error, is true"),
        ("members.0.quantization", {"subset_size": True},
         "quantization.subset_size: Value error, is true"),
        ("members.0.networks.FP8", {}, "members.0.networks.FP8"),
        ("image.resize_shorter", 15, "resize_shorter 15 is under input_size 16"),
        ("image.input_size", 0, "image.input_size"),
        ("name", "../x", "name"),
    
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(content, tmp_path, place, value, says):
    with pytest.raises(ModelSetError) as caught:
        read(tmp_path, changed(content, place, value))
    assert says in caught.value.message
    assert str(tmp_path / "manifest.yaml") in caught.value.message


@cases(
    "data, says",
    (b"", "top: "),
    (b"a: [", "is not YAML"),
    (b"\xff\xfe\xfa", "is not YAML"),
    (b"- 1", "top: "),
    (None, r"cannot read .*No such file"),
)
def test_what_is_no_manifest(tmp_path, data, says):
    if data is not None:
        (tmp_path / "manifest.yaml").write_bytes(data)
    with pytest.raises(ModelSetError, match=says):
        read_manifest(tmp_path)


@cases(
    "line, says",
    ("name: other", "the key 'name' stands twice"),
    ("max_drop: 0.01\nmax_drop: 1.0", "the key 'max_drop' stands twice"),
    ("measured: 2026-13-21", "'2026-13-21' cannot be read: month must be in 1..12"),
    (f"max_drop: {'9' * 5000}", "Exceeds the limit"),
    (f"hint: {'[' * 5000}", "nested too deeply"),
    ("hint: !!timestamp soon", "'soon' cannot be read"),
    ("hint: !!int ''", "cannot be read"),
    ("? [1, 2]\n: 3", "unhashable key"),
    ("image: {input_size: 1, input_size: 2}", "the key 'input_size' stands twice"),
)
def test_yaml_that_no_manifest_has(content, tmp_path, line, says):
    others = {"image", "hint", "max_drop"}
    text = yaml.safe_dump({key: value for key, value in content.items() if key not in others})
    (tmp_path / "manifest.yaml").write_text(f"{text}{line}\n", "utf-8")
    with pytest.raises(ModelSetError) as caught:
        read_manifest(tmp_path)
    assert says in caught.value.message
    assert str(tmp_path / "manifest.yaml") in caught.value.message


def test_merged_mappings_may_have_a_key_twice(content, tmp_path):
    """``<<`` is there to be overridden."""
    text = yaml.safe_dump(content | {"hint": "x"}).replace("hint: x", "")
    text = text.replace("image:\n", "image:\n  <<: {input_size: 1, resize: crop}\n")
    (tmp_path / "manifest.yaml").write_text(text, "utf-8")
    assert read_manifest(tmp_path).image.input_size == content["image"]["input_size"]


def test_a_manifest_cannot_be_changed_and_has_no_other_precision(tiny_set):
    manifest = read_manifest(tiny_set)
    with pytest.raises(ModelSetError, match="member sure has no FP16 network; it has: INT8"):
        manifest.members[0].network("FP16")
    with pytest.raises(ValueError, match="frozen"):
        manifest.name = "other"  # type: ignore[misc]


def test_a_file_is_described_by_its_hash(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    record = FileRecord.of(tmp_path, "f")
    assert record.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(ModelSetError, match="cannot read"):
        sha256_of(tmp_path / "missing")


def test_a_threshold_is_of_multi_label_sets(tmp_path):
    manifest = read_manifest(write_tiny_set(tmp_path / "tiny"))
    assert (manifest.task, manifest.threshold) == ("classification", None)
    facts = manifest.model_dump(mode="json", exclude_none=True)
    old = {key: value for key, value in facts.items() if key != "task"}
    assert Manifest.model_validate(old) == manifest
    assert Manifest.model_validate(old | {"task": "multi_label"}).threshold == 0.5
    for wrong in ({"threshold": 0.5}, {"task": "multi_label", "threshold": 1.0}, {"task": "x"}):
        with pytest.raises(ValidationError, match=r"threshold|task"):
            Manifest.model_validate(old | wrong)


def test_a_number_of_images_that_no_float_holds(tiny_set, tmp_path):
    """Fuzzing brought this up: the accuracy gate raised OverflowError."""
    manifest = with_accuracy(read_manifest(tiny_set), {"sure": 0.9}, {"sure": 0.001})
    content = changed(manifest.model_dump(mode="json"), "accuracy.0.num_images", 10**400)
    with pytest.raises(ModelSetError, match=r"accuracy\.0\.num_images: .* 1000000000"):
        read(tmp_path, content)


@cases(
    "num_right, num_images, low, high",
    (0, 10, 0, 0.2775),
    (10, 10, 0.7225, 1),
    (5, 10, 0.2366, 0.7634),
    (1, 1, 0.2065, 1),
    (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0, 0.1611),
    (1, 29, 0.0061, 0.1718),
    (90, 100, 0.8256, 0.9448),  # by hand
    (200, 200, 0.9812, 1),
    (0, 200, 0, 0.0188),
)
def test_wilson_gives_the_published_intervals(num_right, num_images, low, high):
    assert wilson_interval(num_right, num_images) == pytest.approx((low, high), abs=5e-5)


@BOUNDED
@given(num_images=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_ends_of_a_wilson_interval_are_where_the_score_test_rejects(num_images, share):
    num_right = round(share * num_images)
    low, high = wilson_interval(num_right, num_images)
    assert 0 <= low <= num_right / num_images + 1e-12
    assert num_right / num_images - 1e-12 <= high <= 1
    for end in (low, high):  # (p - end)^2 = z^2 end (1 - end) / n
        squared = (num_right / num_images - end) ** 2
        assert squared == pytest.approx(Z95**2 * end * (1 - end) / num_images, abs=1e-9)
    mirrored = wilson_interval(num_images - num_right, num_images)  # of the wrong answers
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


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


def test_the_first_folder_wins_and_an_absent_set_names_what_there_is(folder, tmp_path):
    other = write_tiny_set(tmp_path / "first" / "tiny", gains={"other": 1.0})
    first = load_model_set("tiny", (other.parent, folder.parent))
    assert [member.name for member in first.manifest.members] == ["other"]
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


@cases(
    "data, labels",
    (b"a\r\nb\r\nc", ("a", "b", "c")),
    (b"a \n\n b\nc\n\n", ("a", "b", "c")),
    (  # a byte order mark, and separators of Unicode
        b"\xef\xbb\xbf" + "cat\ntwo\u2028parts\na\x0cb\n".encode(),
        ("cat", "two\u2028parts", "a\x0cb"),
    ),
)
def test_line_ends_and_empty_lines_do_not_matter(folder, data, labels):
    assert with_labels(folder, data).labels == labels


@cases(
    "data, says",
    (b"blue\ngreen\n", "has 2 labels, the manifest says num_classes: 3"),
    (b"a\nb\n\xff\n", "not UTF-8"),
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


@pytest.mark.parametrize(
    ("precision", "sizes", "measured_mib"),  # the peak that loads added, on AVX512-VNNI
    [("INT8", 1, 159), ("INT8", 3, 479), ("INT8", 4, 654), ("FP16", 3, 710)],
)
def test_the_memory_of_the_bundled_networks_is_estimated(precision, sizes, measured_mib):
    needed = load_model_set("imagenette").memory_needed(precision, sizes)
    assert list(needed) == ["resnet50", "densenet169"]
    assert sum(needed.values()) / 2**20 == pytest.approx(measured_mib, rel=0.05)


def test_a_built_in_batch_size_takes_memory_once_and_a_missing_file_none(loaded):
    path = loaded.folder / "sure.xml"
    text = path.read_text()
    each = memory_needed(path, "INT8", 1)
    assert memory_needed(path, "INT8", 3) == pytest.approx(3 * each, abs=3)
    path.write_text(text.replace('<data shape="?,', '<data shape="1,', 1))
    assert memory_needed(path, "INT8", 3) == pytest.approx(each, abs=3)
    session = loaded.folder / "sure.onnx"
    session.write_bytes(bytes(100))
    assert memory_needed(session, "INT8", 3) == 200
    assert memory_needed(path.with_name("none.xml"), "INT8", 3) == 0
