"""``tandem ladder``: refusals before anything runs, exit codes, and the files it writes."""

import json

import pytest

from calibration.ladder import ladder as run
from calibration.ladder.rungs import LadderError, RungResult
from models.errors import ModelSetError
from models.files import ResultFileError
from tests.support.calibration.ladders import FakeProcesses
from tests.support.command_line import tandem


@pytest.fixture
def fakes(monkeypatch) -> FakeProcesses:
    fakes = FakeProcesses()
    monkeypatch.setattr(run, "run_engine", fakes)
    return fakes


def ladder(tmp_path, *arguments: object, network: str = "resnet18"):
    return tandem("ladder", network, "--work", tmp_path / "work", *arguments)


def test_files_of_a_whole_ladder(tmp_path, fakes):
    files = {kind: tmp_path / f"ladder.{kind}" for kind in ("json", "svg", "html")}
    done = ladder(
        tmp_path,
        "--random-weights",
        *("--json", files["json"], "--plot", files["svg"], "--html", files["html"]),
    )
    assert done.exit_code == 0, done.output
    content = json.loads(files["json"].read_text())
    assert content["network"] == "resnet18"
    assert content["input_size"] == 224
    assert {rung["outcome"] for rung in content["rungs"]} == {"measured", "skipped"}
    assert content["machine"]["cpu"]
    assert "<svg" in files["svg"].read_text()
    assert "</html>" in files["html"].read_text()
    assert "from eager PyTorch" in done.output


def test_json_on_stdout_is_all_there_is(tmp_path, fakes):
    done = ladder(tmp_path, "--random-weights", "--json", "-", "--rungs", "eager,int8")
    assert [rung["name"] for rung in json.loads(done.stdout)["rungs"]] == ["eager", "int8"]


def test_nothing_measured_is_exit_code_1(tmp_path, fakes):
    assert ladder(tmp_path, "--random-weights", "--rungs", "cascade").exit_code == 1


def test_a_failed_rung_is_exit_code_1_after_the_table(tmp_path, fakes):
    fakes.answers["compile"] = RungResult(outcome="failed", reason="its process died")
    done = ladder(tmp_path, "--random-weights")
    assert done.exit_code == 1
    assert "failed torch.compile: its process died" in done.output
    assert "INT8 by NNCF" in done.output


def test_ctrl_c_is_exit_code_130_and_resume_goes_on(tmp_path, fakes):
    fakes.answers["threads"] = KeyboardInterrupt()
    stopped = ladder(tmp_path, "--random-weights")
    assert stopped.exit_code == 130
    assert "--resume" in stopped.output
    fakes.answers.clear()
    fakes.tasks.clear()
    assert ladder(tmp_path, "--random-weights", "--resume").exit_code == 0
    assert "eager" not in fakes.tasks
    assert "threads" in fakes.tasks


def test_resume_with_another_length_is_refused(tmp_path, fakes):
    ladder(tmp_path, "--random-weights", "--rungs", "eager")
    done = ladder(tmp_path, "--random-weights", "--seconds", 3, "--resume")
    assert isinstance(done.exception, LadderError)
    assert "other seconds" in done.exception.message


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--seconds", "0"], LadderError, "--seconds is 0"),
        (["--seconds", "nan"], LadderError, "--seconds is nan"),
        (["--json", "/no/such/folder/x.json"], ResultFileError, "cannot write"),
        (["--plot", "x.png"], LadderError, "ends with .svg"),
        (["--html", "-"], ResultFileError, "--html - is no file"),
        (["--plot", "-"], ResultFileError, "--plot - is no file"),
        (["--rungs", "eager,"], LadderError, "there are eager"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, fakes, arguments, kind, message):
    done = ladder(tmp_path, "--random-weights", *arguments)
    assert isinstance(done.exception, kind)
    assert message in done.exception.message
    assert fakes.tasks == {}


def test_a_set_that_is_not_there(tmp_path, fakes):
    assert isinstance(ladder(tmp_path, network="nothing").exception, ModelSetError)
