"""Sets learned from a few pictures on tiny networks, by the command."""

import hashlib
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime

import cv2
import numpy as np
import pytest

from app.environment import MIB
from app.samples.feedback import TaughtFolder
from app.samples.samples import SampleFolder, sample_of
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import evaluate_set
from calibration.learning import features
from calibration.learning.photographs import photographs_of
from models.errors import ModelSetError
from models.model_set import earlier_sets, load_model_set
from tests.support.answers import answer_of
from tests.support.calibration.noisy_pictures import write_noisy
from tests.support.command_line import tandem


@pytest.fixture
def learn(tiny_set, tmp_path):
    def run(*arguments, is_refused=False):
        done = tandem(
            *("learn", "own", "--into", tmp_path / "sets", "--json", tmp_path / "out.json"),
            *arguments,
        )
        if is_refused:
            assert isinstance(done.exception, ModelSetError)
            return done.exception.message
        assert done.exit_code == 0, done.output
        return json.loads((tmp_path / "out.json").read_text("utf-8"))

    return run


def own(tmp_path):
    return load_model_set(str(tmp_path / "sets" / "own"))


def test_a_learned_set_is_a_set_like_any_other(learn, photographs, tiny_set, tmp_path):
    told = learn("--images", photographs, "--from", tiny_set)
    learned = own(tmp_path)
    assert learned.labels == ("blue", "green", "red")
    assert learned.problems() == []
    record = learned.manifest.accuracy[0]
    assert record.scores["INT8"]["ensemble"].top1 == 1
    assert record.num_images == told["num_photographs"] == 36
    assert told["judged_by"] == "cross-validation, 5 folds"
    assert tandem("models", "verify", learned.folder).exit_code == 0
    listed = tandem("models", "list", "--model-dir", tmp_path / "sets", "--json")
    assert {"own"} <= {row["name"] for row in json.loads(listed.stdout)}


def test_the_graph_answers_what_it_has_not_seen(learn, photographs, tiny_set, tmp_path):
    learn("--images", photographs, "--from", tiny_set)
    learned = own(tmp_path)
    dataset = read_dataset(write_noisy(tmp_path / "new", 10, 7), learned)
    measured = evaluate_set(learned, dataset, ("INT8",))
    assert measured.tallies["INT8"]["ensemble"].top1 == 1


def test_photographs_that_were_learned_from_judge_nothing(learn, photographs, tiny_set, tmp_path):
    learn("--images", photographs, "--from", tiny_set)
    done = tandem("evaluate", own(tmp_path).folder, "--images", photographs)
    assert "were used to make own" in str(done.exception)


def test_features_are_computed_once(learn, photographs, tiny_set, monkeypatch):
    learn("--images", photographs, "--from", tiny_set)

    def fail(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(features, "_computed", fail)
    learn("--images", photographs, "--from", tiny_set, "--replace")


def test_a_second_run_adds_photographs_and_classes(learn, photographs, tiny_set, tmp_path):
    learn("--images", photographs, "--from", tiny_set)
    first = own(tmp_path)
    rng = np.random.default_rng(4)
    more = write_noisy(tmp_path / "more", 5, 9)
    grey = tmp_path / "more" / "grey"
    shutil.copytree(more / "blue", grey)
    for path in grey.iterdir():
        level = rng.integers(0, 40, (24, 24, 1)) + np.array([200, 200, 200])
        path.write_bytes(cv2.imencode(".png", level.astype(np.uint8))[1].tobytes())
    shutil.rmtree(photographs)  # their features are kept
    told = learn("--images", more)
    assert told["num_photographs"] == 36 + 20
    second = own(tmp_path)
    assert second.labels == ("blue", "green", "red", "grey")
    assert second.manifest.accuracy[0].scores["INT8"]["ensemble"].top1 > 0.95
    assert [version.fingerprint() for version in earlier_sets(second.folder)] == [
        first.fingerprint()
    ]


def test_what_a_service_was_taught_makes_the_next_version(learn, photographs, tiny_set, tmp_path):
    learn("--images", photographs, "--from", tiny_set)
    kept = tmp_path / "kept"
    taught, sampled = TaughtFolder(kept / "taught", MIB, 100), SampleFolder(kept / "samples", MIB)
    more = write_noisy(tmp_path / "more", 4, 9)
    for path in sorted(more.glob("*/*.png"))[:8]:
        taught.keep(path.read_bytes(), path.parent.name, "own")
    moved = (photographs / "red" / "0-1.png").read_bytes()
    taught.keep(moved, "red", "own")
    taught.keep(moved, "green", "own")  # what was said last
    red = [path.read_bytes() for path in sorted((more / "red").iterdir())]
    samples = [
        sample_of(data, replace(answer_of(), request_id=str(n)), 0, datetime.now(UTC), other)
        for n, (data, other) in enumerate(zip(red, (None, answer_of(), None, None), strict=True))
    ]
    assert all(map(sampled.write, samples))
    taught.correct("0", 0, "red", "own")
    taught.correct("9", 0, "red", "own")  # of a sample that was not kept
    told = learn("--corrections", kept)
    assert told["num_photographs"] == 36 + 8 + 1
    own_photographs = photographs_of(own(tmp_path))
    sha256 = hashlib.sha256(moved).hexdigest()
    assert [p.label for p in own_photographs if p.sha256 == sha256] == ["green"]
    (note,) = [note for note in told["notes"] if "differently" in note]
    assert note.startswith("1 samples that versions answer differently have no label")
    assert any("change their class" in note for note in told["notes"])
    (tmp_path / "empty").mkdir()
    refusal = learn("--corrections", tmp_path / "empty", is_refused=True)
    assert refusal.startswith("no photograph with a label lies in")
    assert learn(is_refused=True).startswith("nothing to learn from: give --images")


def test_many_classes_of_two_photographs_each(learn, tiny_set, tmp_path):
    rng = np.random.default_rng(6)
    for number in range(300):
        (folder := tmp_path / "many" / f"class {number}").mkdir(parents=True)
        for count, level in enumerate(rng.integers(0, 256, (2, 3))):
            pixels = np.full((24, 24, 3), level, np.uint8)
            (folder / f"{count}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    told = learn("--images", tmp_path / "many", "--from", tiny_set)
    assert (told["num_classes"], told["num_photographs"]) == (300, 600)
    learned = own(tmp_path)
    assert learned.labels[:3] == ("class 0", "class 1", "class 2")
    assert learned.problems() == []
    assert tandem("models", "verify", learned.folder).exit_code == 0


def test_another_set_of_that_name_is_not_overwritten(learn, photographs, tiny_set, tmp_path):
    shutil.copytree(tiny_set, tmp_path / "sets" / "own")
    output = learn("--images", photographs, "--from", tiny_set, is_refused=True)
    assert "was not made by tandem learn" in output


def test_damaged_files_are_named_and_left_out(learn, photographs, tiny_set):
    (photographs / "blue" / "broken.png").write_bytes(b"no image")
    whole = (photographs / "red" / "0-1.png").read_bytes()
    (photographs / "red" / "cut.png").write_bytes(whole[: len(whole) // 2])
    told = learn("--images", photographs, "--from", tiny_set)
    assert told["num_photographs"] == 36
    (note,) = [note for note in told["notes"] if "left out" in note]
    assert note.startswith("2 photographs are left out")
    assert "broken.png" in note
    assert "cut.png" in note


def test_a_class_with_few_photographs_is_held_out_one_by_one(learn, tiny_set, tmp_path):
    folder = write_noisy(tmp_path / "few", 4)
    told = learn("--images", folder, "--from", tiny_set)
    assert told["judged_by"] == "cross-validation, leave-one-out"
    assert told["accuracy"]["scores"]["INT8"]["ensemble"]["top1"] == 1


def test_validation_judges_where_it_is_given(learn, photographs, tiny_set, tmp_path):
    validation = write_noisy(tmp_path / "validation", 8, 11)
    shutil.copy(photographs / "red" / "0-1.png", validation / "red" / "copy.png")
    write_noisy(validation, 2, 12, ("violet",))
    told = learn("--images", photographs, "--from", tiny_set, "--validation", validation)
    assert told["accuracy"]["num_images"] == 24
    assert any("do not judge" in note for note in told["notes"])
    assert any("violet" in note for note in told["notes"])


def test_a_wrong_label_is_found(learn, photographs, tiny_set):
    (photographs / "blue" / "0-3.png").rename(photographs / "red" / "stray.png")
    told = learn("--images", photographs, "--from", tiny_set)
    first = told["wrong"][0]
    assert first["path"].endswith("stray.png")
    assert (first["label"], first["answer"]) == ("red", "blue")
    assert told["confused"][0] == {"label": "red", "answer": "blue", "times": 1}


def test_the_class_none_tells_how_many_foreign_photographs_are_sure(learn, tiny_set, tmp_path):
    photographs = write_noisy(tmp_path / "many", 60)
    others = write_noisy(tmp_path / "others", 20, 13, ("dark",))
    told = learn("--images", photographs, "--from", tiny_set, "--others", others / "dark")
    foreign = told["foreign"]
    assert foreign["num"] == 20
    assert foreign["with_none"] <= foreign["without"] <= 20
    assert own(tmp_path).labels == ("blue", "green", "none", "red")


def test_the_page_shows_what_is_surely_wrong(learn, photographs, tiny_set, tmp_path):
    (photographs / "red").rename(photographs / "<b>red")
    (photographs / "blue" / "0-3.png").rename(photographs / "<b>red" / "stray.png")
    learn("--images", photographs, "--from", tiny_set, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "data:image/jpeg;base64," in page
    assert "stray.png" in page
    assert "<b>red" not in page


def test_a_set_has_a_card(learn, photographs, tiny_set, tmp_path):
    learn("--images", photographs, "--from", tiny_set)
    card = (tmp_path / "sets" / "own" / "README.md").read_text("utf-8")
    assert "3 classes, learned from 36 photographs on the features of tiny." in card
    assert "INT8 1.0000" in card


def test_no_wrong_answer_is_no_reason_to_be_sure_of_every_answer(learn, tiny_set, tmp_path):
    told = learn("--images", write_noisy(tmp_path / "many", 60), "--from", tiny_set)
    assert told["wrong"] == []
    assert told["sure"]["probability"] > 0.9
