"""The ensemble in this process: one image, many, and ``tandem classify-offline``."""

import json
import re
import subprocess
import sys

import pytest

from calibration.offline import Answer, load
from calibration.sets.transaction import write_manifest
from models.ensemble import NO_BOUND
from models.errors import ImageError, ModelSetError, NotAnImageError
from models.golden import GoldenMismatchError
from models.manifest import read_manifest
from models.model_set import load_model_set
from models.record import PRECISIONS, FileRecord
from tests.support import tiny_networks
from tests.support.calibration.evaluated_sets import two_precisions
from tests.support.command_line import classify_offline, tandem
from tests.support.plans import planned
from tests.support.scored_sets import scored_picture, write_scored_set

STOP_AT = 0.669  # the tiny network ``unsure`` answers 0.667 to 0.671


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pictures of three colours, more than a batch."""
    return sorted(
        tiny_networks.write_pictures(tmp_path_factory.mktemp("pictures"), 7).rglob("*.png")
    )


@pytest.fixture(scope="module")
def ensemble(tiny_set):
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


def test_files_in_memory_are_answered_as_those_on_disk_and_no_image_raises(ensemble, files):
    mixed = [file.read_bytes() if place % 2 else file for place, file in enumerate(files)]
    answers = list(ensemble.classify_many([*mixed, b"no image"]))
    assert isinstance(answers.pop(), NotAnImageError)
    assert answers == list(ensemble.classify_many(files))
    with pytest.raises(ImageError, match="image"):
        ensemble.classify(b"no image")


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
    answers = list(ensemble.classify_many([*files[:5], bad, *files[5:], tmp_path / "gone.png"]))
    assert isinstance(answers.pop(5), NotAnImageError)
    assert isinstance(answers.pop(), FileNotFoundError)
    for file, answer in zip(files, answers, strict=True):
        alone = ensemble.classify(file)
        assert isinstance(answer, Answer)
        assert answer.label == alone.label == file.parent.name
        probability = alone.predictions[0].probability
        assert answer.predictions[0].probability == pytest.approx(probability, abs=1e-6)


@pytest.fixture(scope="module")
def fast_set(tmp_path_factory):
    """A set whose fast plan lets ``unsure`` answer some of the pictures alone."""
    folder = tiny_networks.write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
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

        own = network.predict_all
        monkeypatch.setattr(network, "predict_all", predict)

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


def test_a_multi_label_set_lists_what_is_above_the_threshold(tmp_path):
    scored = load(str(write_scored_set(tmp_path / "scored")))
    low, high = (scored.classify(scored_picture("black"), 3, at) for at in (0.001, 0.999))
    assert (low.threshold, len(low.predictions)) == (0.001, 3)
    assert (high.label, high.predictions) == (None, [])
    assert high.fields()["members"] == {name: {"predictions": []} for name in high.members}


def test_a_set_that_lost_too_much_or_answers_otherwise_is_refused(tmp_path):
    folder = tiny_networks.write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.9, "ensemble": 0.9}
    write_manifest(folder, tiny_networks.with_accuracy(read_manifest(folder), top1, {"sure": 0.1}))
    with pytest.raises(ModelSetError, match=r"costs sure 10\.00 points.*Only tandem serve has"):
        load(str(folder))
    folder, other = tiny_networks.write_opposite_sets(tmp_path)
    tiny_networks.take_golden(folder, other)
    with pytest.raises(GoldenMismatchError, match="does not answer as where the set was made"):
        load(str(folder))


@pytest.mark.parametrize("asked", [None, "auto", "FP16"])
def test_a_float_set_answers(tmp_path, files, asked):
    folder = tiny_networks.write_tiny_set(tmp_path / "floats", precision="FP16")
    ensemble = load(str(folder), asked)
    assert (ensemble.precision, ensemble.classify(files[0]).label) == ("FP16", "mostly blue")
    with pytest.raises(ModelSetError, match="has no INT8 network"):
        load(str(folder), "INT8")
    with pytest.raises(ModelSetError, match="precision 'FP32': INT8, FP16 or auto"):
        load(str(folder), "FP32")


def test_the_variable_chooses_the_networks(tmp_path, files, monkeypatch):
    folder = two_precisions(tmp_path / "both")
    of = load_model_set(str(folder)).fingerprints
    versions = []
    for value in (None, "auto", "INT8", "FP16"):
        if value is not None:
            monkeypatch.setenv("TANDEM_PRECISION", value)
        (row,) = map(json.loads, classify_offline(folder, "--json", files[0]).splitlines())
        versions.append(row["model_version"])
    assert versions == [of["INT8"]] * 3 + [of["FP16"]]
    assert load(str(folder), "INT8").model_version == of["INT8"]  # what is said counts first


def test_auto_is_float_where_int8_answers_otherwise(tmp_path, monkeypatch, capsys):
    folder, other = tiny_networks.write_opposite_sets(tmp_path)
    wrong, right = (json.loads((f / "golden.json").read_text()) for f in (other, folder))
    for name, answers in wrong["answers"].items():
        answers["FP16"] = right["answers"][name]["INT8"]
    (folder / "golden.json").write_text(json.dumps(wrong))
    of_int8 = read_manifest(folder)
    members = tuple(
        member.model_copy(update={"networks": dict.fromkeys(PRECISIONS, member.networks["INT8"])})
        for member in of_int8.members
    )
    update = {"members": members, "golden": FileRecord.of(folder, "golden.json")}
    write_manifest(folder, of_int8.model_copy(update=update))
    with pytest.raises(GoldenMismatchError):
        load(str(folder))
    monkeypatch.setenv("TANDEM_PRECISION", "auto")
    assert load(str(folder)).precision == "FP16"
    assert "FP16 answers, not INT8" in capsys.readouterr().err


def test_a_table_and_more_classes_than_there_are(tiny_set, pictures):
    said = classify_offline(tiny_set, pictures, exit_code=1)
    assert "1 of 10 failed" in said
    assert all(folder.name in said for folder in pictures.iterdir() if folder.is_dir())
    done = tandem("classify-offline", "--model-set", tiny_set, "--top-k", 4, pictures)
    assert "this model set has 3 classes" in str(done.exception)


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


def test_without_ray(tiny_set, pictures):
    """Neither Ray nor a web framework is imported to classify in process."""
    script = (
        "import sys\n"
        "from app.cli.main import app\n"
        f"app(['classify-offline', '--model-set', {str(tiny_set)!r}, '--json', "
        f"{str(sorted(pictures.rglob('*.png'))[0])!r}], standalone_mode=False)\n"
        "sys.exit(', '.join({'ray', 'fastapi'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
