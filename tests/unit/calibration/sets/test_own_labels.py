"""Labels in a network's metadata are used where none are stated, or compared with these."""

import json
import zipfile

import onnx
import openvino as ov
import pytest
from onnx import helper

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.labels import label_doubt, notes_of, own_labels
from models.errors import ModelSetError
from tests.support.calibration.added_sets import both, text
from tests.support.calibration.tflite_metadata import tflite
from tests.support.cases import cases
from tests.unit.calibration.sets.test_input_range import MOBILENET, NUM_CLASSES, network

NAMES = [f"kind {number}" for number in range(NUM_CLASSES)]
NAMES[0], NAMES[1] = "it's a cat", 'a "dog"'


def with_notes(path, **notes):
    model = onnx.load(network(path, MOBILENET))
    helper.set_model_props(model, notes)
    onnx.save(model, path)
    return path


def made_of(folder, *paths, labels=None, said=None, **facts):
    members = [(f"m{number}", path) for number, path in enumerate(paths)]
    heard = [] if said is None else said
    new = NewSet("made", members, labels, **facts)
    return add_set(new, folder / "sets", is_replaced=True, say=lambda *row: heard.append(row))


@both
@cases(
    "notes",
    {"names": str(dict(enumerate(NAMES))), "task": "classify", "stride": "32"},
    {"names": json.dumps({str(number): name for number, name in enumerate(NAMES)})},
    {"labels": json.dumps(NAMES)},
    {"id2label": json.dumps(dict(enumerate(NAMES)))},
    {"class_names": "\n".join(NAMES)},
    {"model_info labels": " ".join(name.replace(" ", "_") for name in NAMES)},
    {"classes": ", ".join(NAMES)},
)
def test_labels_in_an_onnx_file_are_used(tmp_path, notes, runtime):
    path, said = with_notes(tmp_path / "net.onnx", **notes), list[tuple[str, str, str | None]]()
    made = made_of(tmp_path, path, said=said, runtimes={"m0": runtime})
    assert list(made.labels) == NAMES
    assert said[0] == ("m0", f"{NUM_CLASSES} labels of its metadata, it's a cat to kind 11", None)


def test_labels_of_an_ir_are_used(tmp_path):
    model = ov.Core().read_model(network(tmp_path / "net.onnx", MOBILENET))
    names = [f"kind {number}" for number in range(NUM_CLASSES)]
    model.set_rt_info([name.replace(" ", "_") for name in names], ["model_info", "labels"])
    ov.save_model(model, tmp_path / "net.xml")
    assert list(made_of(tmp_path, tmp_path / "net.xml").labels) == names


@cases(
    "name, content",
    ("labels.txt", "\n".join(NAMES)),
    ("temp_meta.txt", str({"description": "of Ultralytics", "names": dict(enumerate(NAMES))})),
)
def test_the_text_behind_a_tflite_network_is_read(tmp_path, name, content):
    path = tmp_path / "net.tflite"
    path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(64))
    assert own_labels({}, path) is None
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("about.txt", "")
        archive.writestr(name, content)
    assert list(own_labels({}, path) or ()) == NAMES


def test_the_file_that_tflites_metadata_names_has_the_labels(tmp_path):
    """Another file in the archive may have a better name, and this one any ending."""
    path = tflite(
        tmp_path / "net.tflite",
        files={"classes.map": "\n".join(NAMES)},
        others={"labels.txt": "\n".join(NAMES[::-1])},
    )
    notes = notes_of(ov.Model([], []), path)
    assert notes == {
        "mean_values": "127.5",
        "scale_values": "127.5",
        "reverse_input_channels": "True",
        "label_files": "classes.map",
    }
    assert list(own_labels(notes, path) or ()) == NAMES
    assert list(own_labels({}, path) or ()) == NAMES[::-1]


def test_damaged_metadata_of_tflite_says_nothing(tmp_path):
    """Wherever one byte is another, text is read, or nothing; it ends, and raises nothing."""
    path = tflite(tmp_path / "net.tflite", files={"labels.txt": "a\nb"})
    data = path.read_bytes()
    end, empty = data.index(b"PK"), ov.Model([], [])
    for place in range(end):
        for value in (0, 0xFF):
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            notes = notes_of(empty, path)
            assert all(isinstance(text, str) for text in notes.values())
    for length in range(0, end, 7):
        path.write_bytes(data[:length])
        notes_of(empty, path)


@cases(
    "notes",
    {"names": "__import__('os').system('touch ran')"},
    {"names": "{0: open('ran', 'w')}"},
    {"names": "{" * 9999},
    {"labels": "  "},
    {"author": "somebody"},
)
def test_other_texts_are_no_labels_and_nothing_in_them_runs(tmp_path, monkeypatch, notes):
    monkeypatch.chdir(tmp_path)
    path = with_notes(tmp_path / "net.onnx", **notes)
    says = "net.onnx: no names of all classes in the metadata; give --labels FILE"
    with pytest.raises(ModelSetError, match=says):
        made_of(tmp_path, path)
    assert not (tmp_path / "ran").exists()


def test_labels_that_differ_from_the_metadata_are_reported(tmp_path):
    path, said = with_notes(tmp_path / "net.onnx", names=json.dumps(NAMES)), list[tuple]()
    other = text(tmp_path / "other.txt", *NAMES[:3], "owl", *NAMES[4:])
    same = text(tmp_path / "same.txt", *(f"{name.upper()}, or so" for name in NAMES))
    for labels in (other, same):
        assert list(made_of(tmp_path, path, labels=labels, said=said).labels) != NAMES
    assert [doubt for _, _, doubt in said] == [
        "its metadata has other labels for 1 of 12 classes: 3 is 'kind 3', not 'owl'. Leave "
        "--labels out to take these",
        None,
    ]


def test_another_order_and_another_number_are_told_apart():
    assert "the same labels in another order for 2 of 3" in str(label_doubt("abc", "acb"))
    assert label_doubt("abc", "ab") == "its metadata names 2 classes, from a to b"
    assert label_doubt(["Tench, Tinca tinca"], ["tinca_tinca"]) is None


def test_members_whose_metadata_differ_make_no_set(tmp_path):
    paths = [
        with_notes(tmp_path / f"{number}.onnx", names=json.dumps(NAMES[::order]))
        for number, order in enumerate((1, -1))
    ]
    paths.append(with_notes(tmp_path / "2.onnx"))
    assert list(made_of(tmp_path, paths[2], paths[0]).labels) == NAMES
    with pytest.raises(ModelSetError, match=r"1.onnx: compared .*another order .*--class-ids"):
        made_of(tmp_path, *paths)
