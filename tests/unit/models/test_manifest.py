"""manifest.yaml: every mistake is named with its place, and nothing points out of the folder.

Wilson's interval of an accuracy, against published values and the score test.
"""

import copy

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from calibration.sets.transaction import write_manifest
from models.accuracy import Z95, wilson_interval
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR
from models.record import FileRecord, sha256_of
from tests.support.tiny_networks import with_accuracy, write_tiny_set


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


def test_what_was_written_is_read_back_and_lists_every_file_of_the_set(tiny_set, tmp_path):
    manifest = read_manifest(tiny_set)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.yaml"]
    listed = {record.path for record in manifest.files}
    assert listed == {path.name for path in tiny_set.iterdir()} - {"manifest.yaml"}


def test_bundled_weights_state_their_license_and_what_they_were_trained_on():
    for path in BUNDLED_DIR.glob("*/manifest.yaml"):
        manifest = read_manifest(path.parent)
        assert (manifest.name, manifest.license) == (path.parent.name, "Apache-2.0")
        assert "ImageNet" in manifest.training_data
        card = (path.parent / "README.md").read_text("utf-8")
        for said in ("Apache-2.0", "Imagenette", "non-commercial research", "commercial use"):
            assert said in card


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("colour", "red", "colour: Extra inputs"),
        ("image.resized", 1, "image.resized: Extra inputs"),
        ("image.resize", "squash", "image.resize: Input should be 'crop' or 'stretch'"),
        ("image.interpolation", "box", "image.interpolation: Input should be 'bilinear' or"),
        ("members.0.wieght", 2, "members.0.wieght: Extra inputs"),
        ("labels.path", "/etc/passwd", "must be relative to the manifest's folder"),
        ("labels.path", "../labels.txt", "must be relative to the manifest's folder"),
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
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(content, tmp_path, place, value, says):
    with pytest.raises(ModelSetError) as caught:
        read(tmp_path, changed(content, place, value))
    assert says in caught.value.message
    assert str(tmp_path / "manifest.yaml") in caught.value.message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "top: "),
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"- 1", "top: "),
        (None, r"cannot read .*No such file"),
    ],
)
def test_what_is_no_manifest(tmp_path, data, says):
    if data is not None:
        (tmp_path / "manifest.yaml").write_bytes(data)
    with pytest.raises(ModelSetError, match=says):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("name: other", "the key 'name' stands twice"),
        ("max_drop: 0.01\nmax_drop: 1.0", "the key 'max_drop' stands twice"),
        ("measured: 2026-13-21", "'2026-13-21' cannot be read: month must be in 1..12"),
        (f"max_drop: {'9' * 5000}", "Exceeds the limit"),
        (f"hint: {'[' * 5000}", "nested too deeply"),
        ("hint: !!timestamp soon", "'soon' cannot be read"),
        ("hint: !!int ''", "cannot be read"),
        ("? [1, 2]\n: 3", "unhashable key"),
        ("image: {input_size: 1, input_size: 2}", "the key 'input_size' stands twice"),
    ],
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
    folder = write_tiny_set(tmp_path / "tiny")
    manifest = read_manifest(folder)
    assert (manifest.task, manifest.threshold) == ("classification", None)
    facts = manifest.model_dump(mode="json", exclude_none=True)
    old = {key: value for key, value in facts.items() if key != "task"}
    assert Manifest.model_validate(old) == manifest
    scored = Manifest.model_validate(old | {"task": "multi_label"})
    assert scored.threshold == 0.5
    for wrong in ({"threshold": 0.5}, {"task": "multi_label", "threshold": 1.0}, {"task": "x"}):
        with pytest.raises(ValidationError, match=r"threshold|task"):
            Manifest.model_validate(old | wrong)


def test_a_number_of_images_that_no_float_holds(tiny_set, tmp_path):
    """Fuzzing brought this up: the accuracy gate raised OverflowError."""
    manifest = with_accuracy(read_manifest(tiny_set), {"sure": 0.9}, {"sure": 0.001})
    content = changed(manifest.model_dump(mode="json"), "accuracy.0.num_images", 10**400)
    with pytest.raises(ModelSetError, match=r"accuracy\.0\.num_images: .* 1000000000"):
        read(tmp_path, content)


BOUNDED = settings(max_examples=100, deadline=None, database=None)


@pytest.mark.parametrize(
    ("num_right", "num_images", "low", "high"),
    [
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
    ],
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
