"""``tandem models add``, from its options to a set that the other commands see."""

import importlib
import json
import shlex
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.sets import add_set
from models.errors import ModelSetError
from models.machine import MissingExtraError, needs_extra
from models.model_set import load_model_set
from models.record import ImageRecord
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.scored_sets import scored_model
from tests.support.tiny_networks import LABELS, tiny_model

BAD_NAMES = ("../mine", "/tmp/mine", "..", ".", "''", ".mine", "a/b", "a" * 64)
BAD_MEMBERS = ("../x", "/x", "A", "a-b", "a.b", "1a", "[/x]", "a" * 64)
BAD_NAME = "name: String should match pattern"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """The folder of the user's own sets; nothing is there."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tandem" / "models"


@pytest.fixture(autouse=True)
def nets(tmp_path, monkeypatch) -> Path:
    """The folder that the command runs in: networks a and b, and their labels."""
    folder = tmp_path / "nets"
    folder.mkdir()
    for name, gain in (("a", 8.0), ("b", 2.0)):
        ov.save_model(tiny_model(gain=gain), folder / f"{name}.xml", compress_to_fp16=False)
    (folder / "labels.txt").write_text("\n".join(LABELS), "utf-8")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> None:
    """Start no process for each set: sets/test_add_cases.py adds networks as the command does."""
    monkeypatch.setattr(add_set, "add_set_apart", add_set.add_set_here)


def models(command):
    return tandem("models", *shlex.split(command))


def add(more="", name="mine"):
    return models(f"add {name} --member a=a.xml --member b=b.xml --labels labels.txt {more}")


def refused(result):
    """Return what ``tandem`` would say before it exits with 2."""
    assert isinstance(result.exception, ModelSetError), result.output
    return result.exception.message


def test_what_was_added_is_listed_and_verified(home):
    result = add("--weight a=2 --source 'b=a friend = mine' --description colours --hint more")
    assert result.exit_code == 0, result.exception
    assert f"{home / 'mine'} is there" in result.stdout
    assert "a: FP16" in result.stdout
    assert "a: an embedding of" in result.stdout
    assert "next: tandem quantize mine --images DIR, then" in result.stdout
    assert "tandem evaluate mine --images DIR; tandem serve --model-set mine" in result.stdout
    rows = {row["name"]: row for row in json.loads(models("list --json").stdout)}
    listed = {"folder": str(home / "mine"), "num_classes": 3, "members": ["a", "b"]}
    assert rows["mine"].items() >= listed.items()
    verified = models("verify mine")
    assert verified.exit_code == 0, verified.output
    assert "every network answers as recorded" in verified.stdout
    manifest = load_model_set("mine").manifest
    assert [m.weight for m in manifest.members] == [2.0, 1.0]
    assert manifest.members[1].source == "a friend = mine"
    assert (manifest.description, manifest.hint) == ("colours", "more")


def test_a_set_elsewhere_is_told_by_its_path_as_it_is(home, nets):
    result = add("--into .")
    assert result.exit_code == 0, result.exception
    assert f"tandem evaluate {nets / 'mine'} --images DIR" in result.stdout
    assert models(f"verify {nets / 'mine'}").exit_code == 0
    assert not home.exists()
    result = add("--into 'my [bold] [/] sets'")
    assert result.exit_code == 0, result.exception
    path = nets / "my [bold] [/] sets" / "mine"
    assert "my [bold] [/] sets/mine is there" in result.stdout
    assert f"tandem quantize '{path}' --images DIR" in result.stdout
    assert f"tandem evaluate '{path}' --images DIR; tandem serve --model-set '{path}'" in (
        result.stdout
    )


def test_an_existing_set_is_kept_unless_replace_is_said(home):
    assert add().exit_code == 0
    assert "mine exists; give another name, or --replace" in refused(add("--description again"))
    assert add("--description again --replace").exit_code == 0
    assert load_model_set("mine").manifest.description == "again"
    assert [p.name for p in home.iterdir()] == ["mine"]


@cases(
    "name, more, says",
    *((name, "", BAD_NAME) for name in BAD_NAMES),
    *(("mine", f"--member {name}=a.xml", BAD_NAME) for name in BAD_MEMBERS),
    ("mine", "--resize-shorter 15", "resize_shorter 15 is under input_size 16"),
    ("mine.partial", "", "sets that end in .partial are half-made ones"),
)
def test_a_name_that_leads_elsewhere_writes_nothing(tmp_path, name, more, says):
    before = sorted(tmp_path.rglob("*"))
    assert says in refused(add(f"--replace {more}", name))
    assert sorted(tmp_path.rglob("*")) == before


@cases(
    "more, says",
    ("--weight c=1", "no --member 'c'"),
    ("--source c=x", "no --member 'c'"),
    ("--weight a", "--weight 'a': write NAME=VALUE"),
    ("--weight a=", "--weight 'a=': write NAME=VALUE"),
    ("--weight a=much", "--weight: 'much' is not a number"),
    ("--weight a=inf", "--weight: inf is no finite number"),
    ("--weight a=nan", "--weight: nan is no finite number"),
    ("--weight a=0", "weight: Input should be greater than 0 (given: 0.0)"),
    ("--weight a=-1", "weight: Input should be greater than 0 (given: -1.0)"),
    ("--scale nan", "--scale: nan is no finite number"),
    ("--scale inf", "--scale: inf is no finite number"),
    ("--scale 1,-inf,1", "--scale: -inf is no finite number"),
    ("--scale 0", "--scale '0': write one number"),
    ("--scale 1,-0.0,1", "--scale '1,-0.0,1': write one number"),
    ("--scale 1,2", "--scale '1,2': write one number, or three"),
    ("--scale 1,2,3,4", "or three for three channels"),
    ("--mean NaN", "--mean: NaN is no finite number"),
    ("--mean 1e999", "--mean: 1e999 is no finite number"),
    ("--mean ''", "--mean: '' is not a number"),
    ("--mean 1,,2", "--mean: '' is not a number"),
    ("--resize-shorter 8", "resize_shorter 8 is under input_size 16"),
    ("--input-size 8", "takes 16 px, --input-size says 8"),
    ("--input-size 16x8", "takes 16 px, --input-size says 16x8"),
    *(
        (f"--input-size {text}", "write 1 to 4096 px, or HEIGHTxWIDTH as 64x128")
        for text in ("0", "-1", "x", "16x", "1x2x3", "4097", "16.5")
    ),
    ("--member c", "--member 'c': write NAME=VALUE"),
    ("--member =a.xml", "--member '=a.xml': write NAME=VALUE"),
    ("--member a=b.xml", "--member a is given twice as FP16"),
    ("--member c=none.xml", "cannot read none.xml"),
    ("--member c=labels.txt", "cannot read labels.txt"),
    ("--member ensemble=a.xml", "a member cannot be called ensemble"),
    ("--class-ids labels.txt --labels none.txt", "cannot read none.txt"),
)
def test_what_makes_no_set_is_said_and_leaves_none(home, more, says):
    assert says in refused(add(more))
    assert not home.exists() or list(home.iterdir()) == []


@cases(
    "more, says",
    ("--max-drop 2", "'--max-drop': Input should be less than or equal to 1"),
    ("--max-drop nan", "'--max-drop': Input should be less than or equal to 1"),
    ("--resize-shorter x", "'--resize-shorter': Input should be a valid integer"),
    ("--color-order rgb", "'rgb' is not one of 'RGB', 'BGR'"),
    ("--outputs both", "'both' is not one of 'auto', 'logits', 'probabilities'"),
    ("--resize fit", "'fit' is not one of 'crop', 'stretch'"),
    ("--interpolation nearest", "'nearest' is not one of 'bilinear', 'bicubic'"),
    ("--task tags", "'tags' is not one of 'classification', 'multi_label'"),
)
def test_a_value_out_of_its_range_is_a_matter_of_usage(home, more, says):
    result = add(more)
    assert result.exit_code == 2
    assert says in result.output
    assert not home.exists()


def test_zero_is_a_mean(home):
    assert add("--mean 0 --scale 255,255,127.5 --color-order BGR").exit_code == 0


def test_a_package_that_is_not_there_is_asked_for_by_its_extra_and_no_other_fault_is_that():
    with pytest.raises(MissingExtraError) as caught, needs_extra("calibrate", "models add"):
        importlib.import_module("a_package_that_nobody_has")
    assert "tandem models add needs a_package_that_nobody_has" in caught.value.message
    assert "pip install 'tandem-serve[calibrate]'" in caught.value.message
    with pytest.raises(ZeroDivisionError), needs_extra("calibrate", "models add"):
        _ = 1 / 0


def test_members_may_differ(home, nets):
    ov.save_model(tiny_model(size=8, gain=2.0), nets / "b.xml", compress_to_fp16=False)
    (nets / "ids.txt").write_text("n1\nn2\nn3\n")
    (nets / "own.txt").write_text("n3\nn2\nn1\n")
    (nets / "options.yaml").write_text("b: {resize: stretch, interpolation: bicubic}\n")
    result = add(
        "--resize-shorter 20 --member-options options.yaml --class-ids ids.txt "
        "--member-class-ids b=own.txt"
    )
    assert result.exit_code == 0, result.exception
    manifest = load_model_set(str(home / "mine")).manifest
    first, second = (manifest.image_of(name) for name in "ab")
    assert (first.input_size, first.resize_shorter, first.resize) == (16, 20, "crop")
    assert second == ImageRecord(
        input_size=8, resize_shorter=8, resize="stretch", interpolation="bicubic"
    )
    assert "16, 8 px" in models("list").stdout
    (row,) = [row for row in json.loads(models("list --json").stdout) if row["name"] == "mine"]
    assert row["input_sizes"] == [16, 8]


@cases(
    "content, says",
    ("b: {sise: 8}", "b.sise: Extra inputs are not permitted; a member has input_size, resize"),
    ("b: {scale: [1, 1]}", "b.scale"),
    ("b: {mean: [1, 1, .nan]}", "b.mean.2: Input should be a finite number"),
    ("b: {scale: [1, 0, 1]}", "scale has a zero"),
    ("- b", "should be a valid dictionary"),
    ("b: {", "is not YAML"),
    ("c: {resize: crop}", "no --member 'c'"),
)
def test_options_that_are_none(home, nets, content, says):
    (nets / "options.yaml").write_text(content)
    assert says in refused(add("--member-options options.yaml"))
    assert not home.exists()


def test_a_network_that_runs_one_by_one_is_listed_so(nets):
    pixels = ops.parameter([1, 3, 16, 16], ov.Type.f32)
    means = ops.reduce_mean(pixels, np.array([2, 3]), False)
    flat = ops.multiply(ops.reshape(means, np.array([3]), False), np.float32(9))
    model = ov.Model([ops.reshape(flat, np.array([1, 3]), False)], [pixels], "fixed")
    ov.save_model(model, nets / "b.xml", compress_to_fp16=False)
    assert add().exit_code == 0
    assert "b (one by one)" in " ".join(models("list").stdout.split())
    assert models("verify mine").exit_code == 0


def score_nets(*ends: str) -> None:
    """Write networks that score each class by itself in place of a and b."""
    for name, end in zip("ab", ends, strict=True):
        ov.save_model(scored_model(4.0, end=end), Path(f"{name}.xml"), compress_to_fp16=False)


def test_a_task_that_the_networks_tell_is_said(home):
    score_nets("sigmoid", "sigmoid")
    result = add("--threshold 0.25")
    told = "multi_label, since every network ends in a sigmoid: labels with a score of 0.25 or more"
    assert told in result.stdout
    made = load_model_set("mine").manifest
    assert (made.task, made.threshold) == ("multi_label", 0.25)
    row = next(r for r in json.loads(models("list --json").stdout) if r["name"] == "mine")
    assert (row["task"], row["threshold"]) == ("multi_label", 0.25)
    assert models("verify mine").exit_code == 0


def test_a_task_that_was_named(home):
    score_nets("logits", "logits")
    result = add("--task multi_label --outputs logits")
    assert "multi_label: labels with a score of 0.5 or more" in result.stdout
    assert load_model_set("mine").manifest.task == "multi_label"


@cases(
    "ends, more, says",
    (("sigmoid", "softmax"), "", "Say which it is: --task multi_label"),
    (("sigmoid", "logits"), "", "a (a.xml) end in a sigmoid"),
    (("sigmoid", "sigmoid"), "--task classification", "that is --task multi_label"),
    (("softmax", "softmax"), "--task multi_label", "no member of a multi_label set"),
    (("softmax", "softmax"), "--threshold 0.5", "--threshold 0.5 is of multi-label sets"),
    (("sigmoid", "sigmoid"), "--threshold 0", "--threshold 0: give a score above 0"),
    (("sigmoid", "sigmoid"), "--threshold nan", "--threshold nan: give a score above 0"),
)
def test_what_makes_no_multi_label_set(home, ends, more, says):
    score_nets(*ends)
    assert says in refused(add(more))
    assert not home.exists() or list(home.iterdir()) == []


def served_files(*arguments):
    done = tandem("serve", *arguments, "--labels", "labels.txt", "--print-config", "--json")
    assert done.exit_code == 0, done.output
    text, _, rows = done.stdout.partition("{\n")
    return text, {name: row["value"] for name, row in json.loads("{" + rows).items()}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache folder; nothing is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_serve_makes_a_set_of_files_once_and_says_what_it_lacks(nets, cache, monkeypatch):
    (nets / "sub").mkdir()
    for path in (nets / "a.xml", nets / "a.bin"):
        (nets / "sub" / path.name).write_bytes(path.read_bytes())
    files = ("a.xml", "b.xml", "sub/a.xml")
    text, values = served_files(*files)
    assert values["precision"] == "FP16"
    made = load_model_set(values["model_set"])
    assert [member.name for member in made.manifest.members] == ["a", "b", "a_2"]
    assert made.name == "a-b-a_2"
    assert cache in made.folder.parents
    assert "a-b-a_2: not quantised, not measured." in text
    (command,) = [line.strip() for line in text.splitlines() if "models add" in line]
    assert models(command.removeprefix("tandem models ").replace("NAME", "kept")).exit_code == 0
    monkeypatch.setattr(add_set, "add_set_apart", None)  # nothing is made again
    assert served_files(*files)[1]["model_set"] == values["model_set"]


def test_other_weights_or_labels_are_another_set(nets, cache):
    first = served_files("a.xml")[1]["model_set"]
    (nets / "labels.txt").write_text("x\ny\nz\n")
    second = served_files("a.xml")[1]["model_set"]
    (nets / "a.bin").write_bytes((nets / "b.bin").read_bytes())
    assert len({first, second, served_files("a.xml")[1]["model_set"]}) == 3
    assert load_model_set(second).labels == ("x", "y", "z")


@cases(
    "arguments, says",
    (("a.xml",), "networks and --labels go together"),
    (("--labels", "labels.txt"), "networks and --labels go together"),
    (("a.xml", "--labels", "labels.txt", "--model-set", "imagenette"), "files, or the set"),
    (("a.xml", "--labels", "nowhere.txt"), "no such file: nowhere.txt"),
    (("c.xml", "--labels", "labels.txt"), "no such file: c.xml"),
    (("labels.txt", "--labels", "labels.txt"), "Options for a network: tandem models add NAME"),
)
def test_serve_refuses_files_that_make_no_set(cache, arguments, says):
    done = tandem("serve", *arguments, "--print-config")
    assert done.exit_code != 0
    assert says in " ".join(getattr(done.exception, "message", done.output).split())
    assert not list(cache.rglob("manifest.yaml"))
