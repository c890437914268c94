"""The ensemble in this process: one image, many, and ``tandem classify --offline``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from calibration.offline import Answer, LocalEnsemble, load
from calibration.sets.transaction import write_manifest
from models.errors import ImageError, ModelSetError, NotAnImageError
from models.golden import GoldenMismatchError
from models.manifest import read_manifest
from models.model_set import load_model_set
from models.plan import NO_BOUND
from tests.support.command_line import classify_offline, tandem
from tests.support.plans import planned
from tests.support.scored_sets import scored_picture, write_scored_set
from tests.support.tiny_networks import (
    take_golden,
    with_accuracy,
    write_opposite_sets,
    write_pictures,
    write_tiny_set,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures of three colours, more than a batch."""
    return sorted(write_pictures(tmp_path_factory.mktemp("pictures"), 7).rglob("*.png"))


@pytest.fixture(scope="module")
def ensemble(tiny_set: Path) -> LocalEnsemble:
    return load(str(tiny_set))


def test_a_path_and_its_bytes_have_the_same_answer(ensemble, files, tiny_set):
    answer = ensemble.classify(files[0], top_k=3)
    assert answer == ensemble.classify(str(files[0]), 3)
    assert answer == ensemble.classify(files[0].read_bytes(), 3)
    assert answer.label == answer.predictions[0].label == files[0].parent.name
    assert len(answer.predictions) == len(answer.members["sure"]) == 3
    assert answer.members.keys() == {"sure", "unsure"}
    assert answer.agreement
    assert answer.model_version == load_model_set(str(tiny_set)).fingerprint()


def test_files_in_memory_are_answered_as_those_on_disk(ensemble, files):
    mixed = [file.read_bytes() if place % 2 else file for place, file in enumerate(files)]
    answers = list(ensemble.classify_many([*mixed, b"no image"]))
    assert isinstance(answers.pop(), NotAnImageError)
    assert answers == list(ensemble.classify_many(files))


def test_compiled_networks_are_kept_for_the_next_time(tiny_set, files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load(str(tiny_set)).classify(files[0])
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.blob")}
    assert kept
    assert load(str(tiny_set)).classify(files[0]) == first
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.blob")} == kept


def test_a_start_does_not_wait_for_statistics():
    """Their import takes as long as reading both networks from the cache."""
    code = "import calibration.offline, sys; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_many_files_are_answered_in_order_as_each_alone(ensemble, files, tmp_path):
    (bad := tmp_path / "bad.png").write_text("no image")
    mixed = [*files[:5], bad, *files[5:], tmp_path / "gone.png"]
    answers = list(ensemble.classify_many(mixed))
    assert isinstance(answers.pop(5), NotAnImageError)
    assert isinstance(answers.pop(), FileNotFoundError)
    for file, answer in zip(files, answers, strict=True):
        alone = ensemble.classify(file)
        assert isinstance(answer, Answer)
        assert answer.label == alone.label == file.parent.name
        probability = alone.predictions[0].probability
        assert answer.predictions[0].probability == pytest.approx(probability, abs=1e-6)


STOP_AT = 0.669  # the tiny network ``unsure`` answers 0.667 to 0.671


@pytest.fixture(scope="module")
def fast_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set whose fast plan lets ``unsure`` answer some of the pictures alone."""
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
    return planned(folder, (("unsure",), STOP_AT), (("sure",), None), bounds=(0.3, None))


def test_by_the_fast_plan_a_later_member_sees_only_the_images_that_go_on(
    fast_set, files, tmp_path, monkeypatch
):
    full, fast = (load(str(fast_set), plan=plan) for plan in ("full", "fast"))
    asked = dict.fromkeys(("sure", "unsure"), 0)

    def counted(name, network):
        def predict(images):
            asked[name] += len(images)
            return own(images)

        own = network.predict
        monkeypatch.setattr(network, "predict", predict)

    for name, network in fast._networks.compiled["INT8"].items():
        counted(name, network)
    (bad := tmp_path / "bad.png").write_text("no image")
    all_of, fewer = (list(e.classify_many([*files, bad], 3)) for e in (full, fast))
    assert [type(answers.pop()) for answers in (all_of, fewer)] == [NotAnImageError] * 2
    likely = [a.members["unsure"][0].probability >= STOP_AT for a in all_of]
    assert 0 < likely.count(False) < len(files)
    assert asked == {"unsure": len(files), "sure": likely.count(False)}
    for whole, part, stops in zip(all_of, fewer, likely, strict=True):
        assert (whole.plan, whole.asked) == ("full", None)
        assert part.plan == "fast"
        assert part.asked == (["unsure"] if stops else ["unsure", "sure"])
        assert part.skipped_members == (["sure"] if stops else None)
        expected = (whole.members["unsure"] if stops else whole.predictions)[0]
        assert part.label == expected.label
        assert part.predictions[0].probability == pytest.approx(expected.probability, abs=1e-6)
        assert (part.sure, part.no_sure) == ((True, None) if stops else (None, NO_BOUND))


@pytest.mark.parametrize(
    ("plan", "message"),
    [("quick", "plan is 'quick'; give full or fast"), ("fast", "tiny has no fast plan; tandem")],
)
def test_a_plan_that_there_is_not(tiny_set, plan, message):
    with pytest.raises(ModelSetError, match=message):
        load(str(tiny_set), plan=plan)


def test_the_command_answers_by_the_plan(fast_set, files):
    said = classify_offline(fast_set, "--json", "--plan", "fast", *files)
    rows = [json.loads(line) for line in said.splitlines()]
    assert {row["plan"] for row in rows} == {"fast"}
    assert {tuple(row["asked"]) for row in rows} == {("unsure",), ("unsure", "sure")}


def test_what_is_no_image_raises(ensemble):
    with pytest.raises(ImageError, match="image"):
        ensemble.classify(b"no image")


def test_a_multi_label_set_lists_what_is_above_the_threshold(tmp_path):
    scored = load(str(write_scored_set(tmp_path / "scored")))
    low, high = (scored.classify(scored_picture("black"), 3, at) for at in (0.001, 0.999))
    assert (low.threshold, len(low.predictions)) == (0.001, 3)
    assert (high.label, high.predictions) == (None, [])
    assert high.fields()["members"] == {name: {"predictions": []} for name in high.members}


def test_a_set_whose_int8_lost_too_much_is_refused(tmp_path):
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.9, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"sure": 0.1}))
    with pytest.raises(ModelSetError, match=r"costs sure 10\.00 points.*Only tandem serve has"):
        load(str(folder))


def test_a_network_that_answers_otherwise_here_is_refused(tmp_path):
    folder, other = write_opposite_sets(tmp_path)
    take_golden(folder, other)
    with pytest.raises(GoldenMismatchError, match="does not answer as where the set was made"):
        load(str(folder))


def test_a_table(tiny_set, pictures):
    said = classify_offline(tiny_set, pictures, exit_code=1)
    assert "1 of 10 failed" in said
    assert all(folder.name in said for folder in pictures.iterdir() if folder.is_dir())


def test_json_is_that_of_a_service(tiny_set, pictures):
    file = sorted(pictures.rglob("*.png"))[0]
    (row,) = map(json.loads, classify_offline(tiny_set, "--json", "--top-k", 2, file).splitlines())
    assert row["file"] == str(file)
    assert (row["model_set"], row["degraded"], row["agreement"]) == ("tiny", False, True)
    assert row["predictions"][0]["label"] == file.parent.name
    assert len(row["predictions"]) == 2
    own = row["members"]["sure"]
    assert (own["label"], own["predictions"][0]["label"]) == (file.parent.name,) * 2


def test_a_log_gets_a_line_now_and_then(tiny_set, pictures, tmp_path, monkeypatch):
    files, out = sorted(pictures.rglob("*.png")), tmp_path / "answers.jsonl"
    assert "of 9 classified" not in classify_offline(tiny_set, "--out", out, *files)
    out.unlink()
    monkeypatch.setattr("app.cli.classify.LINE_EVERY_S", 0)
    said = classify_offline(tiny_set, "--out", out, *files)
    assert re.findall(r"^(\d) of 9 classified$", said, re.M) == list("123456789")


def test_more_classes_than_there_are(tiny_set, pictures):
    done = tandem("classify", "--offline", "--model-set", tiny_set, "--top-k", 4, pictures)
    assert "this model set has 3 classes" in str(done.exception)


def test_without_ray(tiny_set, pictures):
    """Neither Ray nor a web framework is imported to classify in process."""
    script = (
        "import sys\n"
        "from app.cli.main import app\n"
        f"app(['classify', '--offline', '--model-set', {str(tiny_set)!r}, '--json', "
        f"{str(sorted(pictures.rglob('*.png'))[0])!r}], standalone_mode=False)\n"
        "sys.exit(', '.join({'ray', 'fastapi'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
