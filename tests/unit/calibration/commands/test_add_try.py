"""``tandem models add --try``: answers by each range of pixels, of which a person takes one."""

import json
import shlex

import cv2
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.sets import add_set
from tests.support.calibration.added_sets import softmax
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.unit.calibration.sets.test_input_range import (
    CAFFE,
    CONVNEXT,
    IMAGENET,
    LABELS,
    MOBILENET,
    SCENES,
    SIZE,
    network,
    right,
)

CONVENTIONS = {"0 to 255": (0, 1), "0 to 1": (0, 255), "-1 to 1": (127.5, 127.5)}


@pytest.fixture(autouse=True)
def nets(tmp_path, monkeypatch):
    """The folder that the command runs in: three networks, their labels, two pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(add_set, "try_photos_apart", add_set.try_photos)
    network(tmp_path / "plain.onnx", ())
    network(tmp_path / "keras.onnx", MOBILENET, planes=False)
    network(tmp_path / "means.onnx", CONVNEXT)
    network(tmp_path / "bytes.onnx", (("Cast", 1), *MOBILENET), 2)
    (tmp_path / "labels.txt").write_text("\n".join(LABELS), "utf-8")
    for number in (0, 4):
        cv2.imwrite(f"{number}.png", SCENES[number])
    return tmp_path


def tried(command):
    options = f"--labels labels.txt --resize-shorter {SIZE} --try 0.png 4.png --json"
    answered = tandem("models", *shlex.split(f"add mine {command} {options}"))
    assert answered.exit_code == 0, answered.output
    return {
        (row["member"], row["pixels"], row["how"]["color_order"]): row
        for row in json.loads(answered.stdout)
    }


def test_each_range_answers_as_numpy_does(nets):
    rows = tried("--member plain=plain.onnx --member keras=keras.onnx --runtime plain=onnxruntime")
    assert len(rows) == 2 * 9
    images = SCENES[[0, 4]]
    for (member, pixels, order), row in rows.items():
        step = -1 if order == "RGB" else 1
        if pixels == "less Caffe's mean":
            wanted = right(CAFFE, 1, images, step)
        elif member == "plain":
            mean, scale = CONVENTIONS.get(pixels) or (v[::-step] for v in IMAGENET)
            wanted = right(mean, scale, images, step)
        elif pixels == "0 to 255":
            wanted = right(127.5, 127.5, images, step)
        else:
            continue
        if (member, pixels) == ("keras", "less Caffe's mean"):
            continue
        assert [told["index"] for told in row["answers"]] == wanted.argmax(1).tolist()
        found = [told["probability"] for told in row["answers"]]
        np.testing.assert_allclose(found, wanted.max(1), atol=2e-3)
        assert [told["file"] for told in row["answers"]] == ["0.png", "4.png"]
        assert row["answers"][0]["label"] == LABELS[row["answers"][0]["index"]]


def test_what_a_network_wants_is_marked(nets):
    rows = tried("--member plain=plain.onnx --member keras=keras.onnx --member means=means.onnx")
    wanted = [key for key, row in rows.items() if row["is_wanted"]]
    assert wanted == [
        ("keras", "0 to 255", "RGB"), ("keras", "0 to 255", "BGR"), ("means", "0 to 255", "RGB"),
    ]  # fmt: skip
    assert all(row["is_wanted"] is None for key, row in rows.items() if key[0] == "plain")


def test_integers_and_a_stated_order_leave_fewer(nets):
    assert list(tried("--member a=bytes.onnx")) == [
        ("a", "0 to 255", order) for order in ("RGB", "BGR")
    ]
    rows = tried("--member a=plain.onnx --color-order RGB")
    assert [pixels for _, pixels, _ in rows] == [*CONVENTIONS, "ImageNet's mean and scale"]


def test_grey_networks_have_three_ranges(nets):
    pixels = ops.parameter([1, 1, SIZE, SIZE], np.float32)
    mean = ops.reduce_mean(pixels, np.array([2, 3]), False)
    rows = ops.concat([mean, ops.multiply(mean, np.float32(-3)), ops.add(mean, np.float32(1))], 1)
    ov.save_model(ov.Model([rows], [pixels], "grey"), "grey.xml")
    rows = tried("--member a=grey.xml")
    assert [pixels for _, pixels, _ in rows] == [*CONVENTIONS]
    grey = cv2.cvtColor(SCENES[0], cv2.COLOR_BGR2GRAY).mean()
    for pixels, (mean, scale) in CONVENTIONS.items():
        value = (grey - mean) / scale
        wanted = softmax(np.array([[value, -3 * value, value + 1]]))[0]
        best = rows["a", pixels, "RGB"]["answers"][0]
        assert best["index"] == wanted.argmax()
        assert best["probability"] == pytest.approx(wanted.max(), abs=0.01)


def test_a_table_shows_them_with_the_options_to_write(nets):
    line = "add mine --member a=keras.onnx --try 0.png 4.png"
    shown = tandem("models", *shlex.split(line)).stdout
    assert "class " in shown
    assert "as its file wants" in shown
    assert "No set was made" in shown
    assert "  -1 to 1, BGR: --mean 127.5 --scale 127.5 --color-order BGR" in shown
    assert "--mean 103.939,116.779,123.68 --scale 1" in shown


@cases(
    "more, says",
    ("--try absent.png", "cannot read absent.png"),
    ("--try labels.txt", "--try labels.txt: "),
    ("0.png", "0.png is no option; photographs go behind --try"),
    ("--try " + "0.png " * 17, "--try takes at most 16 photographs, not 17"),
)
def test_what_is_no_photograph_is_refused(nets, more, says):
    answered = tandem("models", *shlex.split(f"add mine --member a=plain.onnx {more}"))
    assert says in str(answered.exception)
    assert not (nets / "mine").exists()


def test_a_set_that_is_made_is_told_as_json_too(nets):
    line = "add mine --member a=keras.onnx --labels labels.txt --into sets --json"
    made = json.loads(tandem("models", *shlex.split(line)).stdout)
    assert (made["name"], made["num_classes"], made["folder"]) == ("mine", 12, "sets/mine")
    assert "its first layers compute" in made["read"][0]["facts"]
