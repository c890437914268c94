"""A set made of networks that are there already appears whole, or the reason why not."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.options import MemberOptions
from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import list_folders, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import ImageRecord, sha256_of
from models.stores import VERSIONS_NAME
from tests.support.calibration import staged_sets
from tests.support.cases import cases
from tests.support.tiny_networks import LABELS, tiny_model


@pytest.fixture
def nets(tmp_path):
    """A folder with networks a and b, three classes each, and their labels."""
    folder = tmp_path / "nets"
    folder.mkdir()
    for name, gain in (("a", 8.0), ("b", 2.0)):
        ov.save_model(tiny_model(gain=gain), folder / f"{name}.xml", compress_to_fp16=False)
    (folder / "labels.txt").write_text("\n".join(LABELS), "utf-8")
    (folder / "ids.txt").write_text("n1\nn2\nn3\n", "utf-8")
    return folder


@pytest.fixture
def into(tmp_path):
    return tmp_path / "sets"


def quantised(path):
    """Save a network that counts as INT8."""
    pixels = ops.parameter([-1, 16, 16, 3], ov.Type.u8)
    low, high = np.float32(0), np.float32(255)
    rounded = ops.fake_quantize(ops.convert(pixels, "f32"), low, high, low, high, 256)
    rows = ops.softmax(ops.reduce_mean(rounded, np.array([1, 2]), False), 1)
    ov.save_model(ov.Model([rows], [pixels], "int8"), path, compress_to_fp16=False)
    return path


def new_set(nets, **changes):
    facts: dict[str, Any] = {
        "name": "mine",
        "members": [("a", nets / "a.xml"), ("b", nets / "b.xml")],
        "labels": nets / "labels.txt",
    }
    return NewSet(**(facts | changes))


def test_a_set_has_what_was_said_and_answers_as_its_networks(nets, into):
    made = add_set(
        new_set(
            nets,
            class_ids=nets / "ids.txt",
            weights={"a": 3.0},
            sources={"b": "a friend"},
            description="colours",
            hint="look closely",
            max_drop=0.25,
            options=MemberOptions(resize_shorter=20),
        ),
        into,
    )
    assert made.folder == into / "mine"
    assert made.manifest == read_manifest(into / "mine")
    assert (made.problems(), made.labels) == ([], LABELS)
    assert made.class_ids == ("n1", "n2", "n3")
    assert made.golden is not None
    assert set(made.golden.answers) == {"a", "b"}
    manifest = made.manifest
    said = (manifest.description, manifest.hint, manifest.max_drop)
    assert said == ("colours", "look closely", 0.25)
    assert (manifest.image.input_size, manifest.image.resize_shorter) == (16, 20)
    assert [(m.name, m.weight, m.source) for m in manifest.members] == [
        ("a", 3.0, f"a.xml, sha256 {sha256_of(nets / 'a.xml')}"),
        ("b", 1.0, "a friend"),
    ]
    images = np.random.default_rng(1).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    for name in "ab":
        options = RuntimeOptions(batch_sizes=(2,))
        before = CompiledNetwork(nets / f"{name}.xml", options).predict(images)
        after = CompiledNetwork(made.network_path(name, "FP16"), options).predict(images)
        assert np.allclose(before, after, atol=1e-3)  # weights are FP16 now


def test_what_is_not_said_has_a_default(nets, into):
    manifest = add_set(new_set(nets), into).manifest
    assert manifest.description == "3 classes"
    assert manifest.class_ids is None
    assert manifest.image.resize_shorter == round(16 * 8 / 7)
    assert {m.weight for m in manifest.members} == {1.0}


def test_a_member_may_have_a_float_and_an_int8_network(nets, into):
    members = [("a", nets / "a.xml"), ("b", nets / "b.xml"), ("a", quantised(nets / "a8.xml"))]
    made = add_set(new_set(nets, members=members), into)
    assert [(m.name, set(m.networks)) for m in made.manifest.members] == [
        ("a", {"FP16", "INT8"}),
        ("b", {"FP16"}),
    ]
    assert made.manifest.members[0].source.startswith("a.xml, ")
    assert made.problems() == []


FILES = {  # beside the networks: what is in no file of the fixture
    "empty.txt": b"",
    "blank.txt": b"\n \n",
    "two.txt": b"n1\nn2\n",
    "four.txt": b"a\n" * 4,
    "not-utf-8.txt": b"\xff\n",
    "doubled.txt": b"n1\nn2\nn2\n",
    "one-more.txt": b"n1\nn2\nn3\nn3\n",
    "others.txt": b"n3\nn4\nn5\n",
}
NO_IDS = r"{}\.txt has \d class ids, \d different ones, for 3"


@cases(
    "changes, says",
    ({"members": {"a": "a.xml", "a ": "small.xml"}}, "of one member take different sizes"),
    ({"members": {f"m{i}": "a.xml" for i in range(9)}}, "9 members; a set has 1 to 8"),
    ({"labels": "empty.txt"}, r"empty\.txt names no class"),
    ({"labels": "blank.txt"}, r"blank\.txt names no class"),
    ({"labels": "two.txt"}, r"two\.txt: 2 labels"),
    ({"labels": "four.txt"}, r"four\.txt: 4 labels"),
    ({"labels": "none.txt"}, r"cannot read .*none\.txt: No such file"),
    ({"labels": "not-utf-8.txt"}, "not UTF-8"),
    ({"class_ids": "two.txt"}, NO_IDS.format("two")),
    ({"class_ids": "doubled.txt"}, NO_IDS.format("doubled")),
    ({"class_ids": "one-more.txt"}, NO_IDS.format("one-more")),
    ({"member_class_ids": {"b": "ids.txt"}}, "without --class-ids"),
    ({"class_ids": "ids.txt", "member_class_ids": {"b": "others.txt"}}, "lacks .*: n1, n2"),
)
def test_what_makes_no_set(nets, into, changes, says):
    for name, content in FILES.items():
        (nets / name).write_bytes(content)
    ov.save_model(tiny_model(size=8), nets / "small.xml")

    def in_nets(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: in_nets(each) for key, each in value.items()}
        return nets / value if str(value).endswith((".txt", ".xml")) else value

    facts = in_nets(changes)
    if "members" in facts:
        facts["members"] = [(name.strip(), path) for name, path in facts["members"].items()]
    with pytest.raises(ModelSetError, match=says):
        add_set(new_set(nets, **facts), into)
    assert not into.exists()


def test_class_counts_that_differ_name_every_file(nets, into):
    pixels = ops.parameter([-1, 16, 16, 3], ov.Type.u8)
    means = ops.reduce_mean(ops.convert(pixels, "f32"), np.array([1, 2]), False)
    rows = ops.softmax(ops.concat([means, means], 1), 1)
    ov.save_model(ov.Model([rows], [pixels], "six"), nets / "b.xml")
    with pytest.raises(ModelSetError) as caught:
        add_set(new_set(nets), into)
    assert f"a ({nets}/a.xml): 16 px, 3 classes" in caught.value.message
    assert f"b ({nets}/b.xml): 16 px, 6 classes" in caught.value.message
    assert not into.exists()


def test_members_may_take_different_sizes(nets, into):
    ov.save_model(tiny_model(size=8), nets / "b.xml")
    made = add_set(new_set(nets), into)
    assert made.problems() == []
    manifest = made.manifest
    assert (manifest.image.input_size, manifest.image.resize_shorter) == (16, 18)
    assert manifest.member("a").image is None
    assert manifest.image_of("b") == ImageRecord(input_size=8, resize_shorter=9)
    assert manifest.inputs.num_bytes == 3 * (16 * 16 + 8 * 8)


@cases(
    "options, record, says",
    ({"resize": "letterbox"}, {"fill": 114}, "with borders of 114 resized to 16 px"),
    ({"resize": "letterbox", "fill": 0}, {}, "with borders of 0 resized to 16 px"),
    ({"resize": "smart_resize"}, {}, "cropped and resized to 16 px"),
    ({"resize": "squash"}, {"resize_shorter": 18}, "stretched to 18 px and cropped to 16"),
    ({"resize": "squash", "resize_shorter": 20}, {"resize_shorter": 20}, "stretched to 20 px"),
)
def test_a_resize_rule_is_kept_and_said(nets, into, options, record, says):
    said = list[str]()
    new = new_set(nets, options=MemberOptions(**options))
    made = add_set(new, into, say=lambda *facts: said.append(facts[1]))
    fields = {"input_size": 16, "resize_shorter": 16, "resize": options["resize"]} | record
    assert made.manifest.image == ImageRecord.model_validate(fields)
    assert all(f"pictures {says}" in facts for facts in said)


def test_a_set_that_is_there_is_replaced_only_if_asked_for(nets, into):
    add_set(new_set(nets), into)
    again = new_set(nets, members=[("b", nets / "b.xml")], description="again")
    said = list[str]()
    with pytest.raises(ModelSetError, match="mine exists; give another name, or --replace"):
        add_set(again, into, say=lambda member, *_: said.append(member))
    assert said == []  # before any network was read
    assert load_model_set(str(into / "mine")).manifest.description == "3 classes"
    made = add_set(again, into, is_replaced=True)
    assert [m.name for m in made.manifest.members] == ["b"]
    named = {record.path for record in made.manifest.files} | {"manifest.yaml", VERSIONS_NAME}
    assert {p.name for p in made.folder.iterdir()} == named
    assert [p.name for p in into.iterdir()] == ["mine"]


def test_a_replacement_that_fails_leaves_the_set(nets, into):
    made = add_set(new_set(nets), into)
    (nets / "ids.txt").write_text("one\n")
    with pytest.raises(ModelSetError, match="1 class ids"):
        add_set(new_set(nets, class_ids=nets / "ids.txt"), into, is_replaced=True)
    assert made.problems() == []
    assert [p.name for p in into.iterdir()] == ["mine"]


def test_a_set_may_be_made_anew_from_its_own_networks(nets, into):
    first = add_set(new_set(nets), into)
    members = [(name, first.network_path(name, "FP16")) for name in "ab"]
    again = new_set(nets, members=members, labels=first.folder / "labels.txt")
    assert add_set(again, into, is_replaced=True).problems() == []


def test_a_network_that_came_as_int8_is_noted(nets, into):
    members = [("a", nets / "a.xml"), ("a", quantised(nets / "a8.xml")), ("b", nets / "a8.xml")]
    made = add_set(new_set(nets, members=members), into)
    assert {m.name: m.imported_int8 for m in made.manifest.members} == {"a": False, "b": True}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_new_set_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "sets" / "mine"
    with create(folder) as staging:
        staged_sets.make(staging)
        assert not folder.exists()
        assert list_folders((folder.parent,)) == []
    assert staged_sets.is_whole(folder)
    assert list_folders((folder.parent,)) == [folder]
    assert names_in(folder.parent) == ["mine"]
    assert len(staged_sets.contents(folder)) == len(read_manifest(folder).files) + 1
    assert load_model_set(str(folder)).golden is not None


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_new_set_that_fails_is_not_there(tmp_path, is_replaced):
    def fail() -> None:
        with create(tmp_path / "mine", is_replaced=is_replaced) as staging:
            staged_sets.make(staging)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names_in(tmp_path) == []


def test_what_is_there_is_not_written_over(folder, tmp_path):
    (photos := tmp_path / "photos").mkdir()
    (photos / "a.jpg").touch()
    before = staged_sets.contents(tmp_path)
    staged_sets.refused(
        "is no model set, and has files; move it away", create(photos, is_replaced=True)
    )
    staged_sets.refused("exists; give another name, or --replace", create(folder))
    assert staged_sets.contents(tmp_path) == before


def test_a_set_is_replaced_as_a_whole(folder):
    with create(folder, is_replaced=True) as staging:
        staged_sets.make(staging)
        assert load_model_set(str(folder)).labels == LABELS
    assert load_model_set(str(folder)).labels == ("a", "b", "c")
    assert len(staged_sets.contents(folder)) == len(read_manifest(folder).files) + 1
    assert names_in(folder.parent) == ["tiny"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_replacement_that_fails_brings_the_old_set_back(folder, error):
    before = staged_sets.contents(folder.parent)

    def is_new(source: Path, target: Path) -> bool:
        is_it = target == folder and "old" not in source.name
        if is_it and error:
            raise error
        return is_it

    with (
        staged_sets.failing(Path, "replace", errno.EIO, is_new),
        pytest.raises(KeyboardInterrupt if error else ModelSetError),
    ):
        staged_sets.replace(folder)
    assert staged_sets.contents(folder.parent) == before
    staged_sets.replace(folder)
    assert staged_sets.is_whole(folder)


def test_a_set_that_a_killed_replacement_took_away_comes_back(folder):
    before = staged_sets.contents(folder)
    folder.replace(folder.with_name(".tiny.old.partial"))
    (folder.with_name(".tiny.partial") / "half").mkdir(parents=True)
    assert list_folders((folder.parent,)) == [folder]  # it is found where it is
    staged_sets.refused("exists; give another name", create(folder))
    assert staged_sets.contents(folder) == before
    assert names_in(folder.parent) == ["tiny"]


def test_what_killed_replacements_left_goes_with_the_next(folder):
    for left in (".tiny.old.partial", ".tiny.partial"):
        shutil.copytree(folder, folder.with_name(left))
    staged_sets.replace(folder)
    files = {record.path for record in read_manifest(folder).files}
    assert set(staged_sets.contents(folder)) == files | {"manifest.yaml"}
    assert names_in(folder.parent) == ["tiny"]


def test_two_commands_do_not_make_the_same_set_at_once(tmp_path):
    folder, yours = tmp_path / "mine", tmp_path / "yours"
    with create(folder) as staging, create(yours) as other:
        staged_sets.make(other)
        staged_sets.refused("another command is changing", create(folder))
        staged_sets.make(staging)
    assert staged_sets.is_whole(folder)
    assert staged_sets.is_whole(yours)


def test_a_link_is_replaced_and_what_it_leads_to_stays(folder, tmp_path):
    before, link = staged_sets.contents(folder), tmp_path / "links" / "tiny"
    link.parent.mkdir()
    link.symlink_to(folder)
    staged_sets.replace(link)
    assert not link.is_symlink()
    assert staged_sets.is_whole(link)
    assert names_in(link.parent) == ["tiny"]
    assert staged_sets.contents(folder) == before
