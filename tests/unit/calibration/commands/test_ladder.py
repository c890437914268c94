"""``tandem ladder``: its plan, refusals before anything runs, exit codes, its report of results."""

import io
import json
import os
import shutil
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from calibration.commands.ladder import against_published, as_json, draw, render, rows_of, show
from calibration.ladder import ladder as run
from calibration.ladder.rungs import LadderError, RungOptions, RungResult
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.files import ResultFileError
from models.manifest import read_manifest
from tests.support.calibration.evaluated_sets import two_precisions
from tests.support.calibration.ladders import FakeProcesses, job_of, measured
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.runtime_files import write_mixed_set
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_tiny_set

RANDOM = {"random_weights": True}
MACHINE = {"cpu": "a CPU", "cores": 2, "measured": "2026-01-01", "versions": {"tandem": "1"}}
ODD = "no <compiler> [bold] & $x^2$"


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
    assert (content["network"], content["input_size"]) == ("resnet18", 224)
    assert {rung["outcome"] for rung in content["rungs"]} == {"measured", "skipped"}
    assert content["machine"]["cpu"]
    assert "<svg" in files["svg"].read_text()
    assert "</html>" in files["html"].read_text()
    assert "from eager PyTorch" in done.output


def test_json_on_stdout_is_all_there_is(tmp_path, fakes):
    done = ladder(tmp_path, "--random-weights", "--json", "-", "--rungs", "eager,int8")
    assert [rung["name"] for rung in json.loads(done.stdout)["rungs"]] == ["eager", "int8"]


def test_the_retired_margin_says_what_to_use(tmp_path, fakes):
    done = ladder(tmp_path, "--random-weights", "--cascade-margin", "0.5")
    assert "the rung fast runs the set's own fast plan" in str(done.exception)


def test_nothing_measured_or_a_failed_rung_is_exit_code_1(tmp_path, fakes):
    assert ladder(tmp_path, "--random-weights", "--rungs", "fast").exit_code == 1
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


@cases(
    "arguments, kind, message",
    (["--seconds", "0"], LadderError, "--seconds is 0"),
    (["--seconds", "nan"], LadderError, "--seconds is nan"),
    (["--json", "/no/such/folder/x.json"], ResultFileError, "cannot write"),
    (["--plot", "x.png"], LadderError, "ends with .svg"),
    (["--html", "-"], ResultFileError, "--html - is no file"),
    (["--plot", "-"], ResultFileError, "--plot - is no file"),
    (["--rungs", "eager,"], LadderError, "there are eager"),
)
def test_mistakes_are_found_before_anything_runs(tmp_path, fakes, arguments, kind, message):
    done = ladder(tmp_path, "--random-weights", *arguments)
    assert isinstance(done.exception, kind)
    assert message in done.exception.message
    assert fakes.tasks == {}


def test_a_set_that_is_not_there(tmp_path, fakes):
    assert isinstance(ladder(tmp_path, network="nothing").exception, ModelSetError)


def test_a_member_has_its_sets_size_and_classes(tiny_set, tmp_path):
    job = job_of(tiny_set, tmp_path, member="unsure")
    assert (job.network.name, job.network.size, job.network.num_classes) == ("unsure", 16, 3)
    assert job.network.model_set == tiny_set
    assert not job.network.is_random


def test_the_bundled_resnet50_has_a_pytorch_source_and_densenet169_has_none(tmp_path):
    resnet = job_of("imagenette", tmp_path)
    assert (resnet.network.torch_source, resnet.impossible) == ("float_ir", {})
    densenet = job_of("imagenette", tmp_path, member="densenet169")
    assert "--random-weights --size 128" in densenet.impossible["eager"]
    assert "latency" not in densenet.impossible


def test_what_a_set_lacks_is_told_by_rung(tmp_path):
    only_int8 = job_of(write_tiny_set(tmp_path / "int8"), tmp_path).impossible
    assert "no float network" in only_int8["openvino"]
    assert {"int8", "ensemble", "service"}.isdisjoint(only_int8)
    assert "has no fast plan; tandem evaluate" in only_int8["fast"]
    only_float = write_tiny_set(tmp_path / "float", precision="FP16", gains={"one": 1.0})
    impossible = job_of(only_float, tmp_path).impossible
    assert "tandem quantize" in impossible["service"]
    assert "one member" in impossible["fast"]
    assert {"openvino", "int8"}.isdisjoint(impossible)


def test_a_member_of_onnx_runtime_runs_as_it_is(tmp_path):
    mixed = write_mixed_set(tmp_path / "set", runtimes=("openvino", "onnxruntime"))
    assert {"ensemble", "service"}.isdisjoint(job_of(mixed, tmp_path).impossible)


def test_both_precisions_leave_nothing_out_but_pytorch(tmp_path):
    job = job_of(two_precisions(tmp_path / "set"), tmp_path)
    engines = {r.engine for r in job.rungs if r.name in job.impossible.keys() - {"fast"}}
    assert engines == {"torch", "onnxruntime"}


@cases(
    "network, asked, kind, message",
    ("resnet18", RANDOM | {"size": 8}, LadderError, "32 to 1024 px"),
    ("resnet18", RANDOM | {"classes": 1}, LadderError, "2 to 100000"),
    ("resnet18", RANDOM | {"member": "a"}, LadderError, "--member with --random-w"),
    ("resnet18", RANDOM | {"rungs": "eagre"}, LadderError, "eager, inference_mode"),
    ("resnet18", {"size": 64}, LadderError, "--size is of --random-weights"),
    ("../resnet18", RANDOM, LadderError, "no name of a torchvision network"),
    ("nothing", {}, ModelSetError, "no model set"),
    ("imagenette", {"member": "vgg"}, ModelSetError, "has no member"),
)
def test_a_mistake_is_named(tmp_path, network, asked, kind, message):
    with pytest.raises(kind, match=message):
        job_of(network, tmp_path, **asked)


@pytest.mark.parametrize("option", ["network", "images", "work"])
def test_a_name_that_is_not_utf8_is_refused(tiny_set, tmp_path, option):
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(tiny_set, odd)
    asked = {"network": tiny_set, "work": tmp_path / "work"} | {option: odd}
    with pytest.raises(LadderError, match=r"caf\\xe9' is not UTF-8"):
        job_of(**asked)


def test_results_depend_on_the_networks_files_and_on_other_members(tiny_set, tmp_path):
    other = write_tiny_set(tmp_path / "other", gains={"sure": 3.0})
    assert job_of(tiny_set, tmp_path).fingerprint != job_of(other, tmp_path).fingerprint
    folder = write_tiny_set(tmp_path / "tiny")
    before, manifest = job_of(folder, tmp_path).fingerprint, read_manifest(folder)
    first, second = manifest.members
    heavier = second.model_copy(update={"weight": 3.0})
    write_manifest(folder, manifest.model_copy(update={"members": (first, heavier)}))
    assert job_of(folder, tmp_path, member=first.name).fingerprint != before


def test_a_multi_label_set_has_no_top1_and_no_fast_plan(tmp_path):
    folder = write_scored_set(tmp_path / "scored")
    with pytest.raises(LadderError, match="--images: scored is multi-label and has no top-1"):
        job_of(folder, tmp_path, images=tmp_path)
    impossible = job_of(folder, tmp_path).impossible
    assert "multi-label: a fast plan needs" in impossible["fast"]
    assert "service" not in impossible


@pytest.fixture
def job(tmp_path):
    return job_of("resnet18", tmp_path, random_weights=True, rungs="eager,batches,compile,int8")


def results(**changes) -> dict[str, RungResult]:
    return {
        "eager": measured(10.0),
        "batches": measured(15.0, RungOptions(batch=8), top1=0.75, watts=20.0),
        "compile": RungResult(outcome="skipped", reason=ODD),
        "int8": measured(60.0, pss_mib=None),
    } | changes


def shown(job, found, width: int = 80) -> str:
    text = io.StringIO()
    show(Console(file=text, width=width), job, rows_of(job, found))
    return text.getvalue()


def test_speed_up_is_over_the_first_and_over_the_one_before_that_was_measured(job):
    rows = rows_of(job, results())
    assert [(r.over_first, r.over_previous) for r in rows] == [
        (1.0, 1.0),
        (1.5, 1.5),
        (None, None),
        (6.0, 4.0),
    ]
    rows = rows_of(job, results(eager=RungResult(outcome="failed", reason="it died")))
    assert [r.over_first for r in rows] == [None, 1.0, None, 4.0]
    assert against_published(rows) == ""  # that one begins with eager PyTorch


def test_the_table_has_the_figures_and_says_why_rungs_are_missing(job):
    text = shown(job, results())
    assert "top-1" in text
    assert ODD in text
    assert "random weights: speed only" in text
    assert next(line for line in text.splitlines() if line.startswith("INT8")).split()[3:] == [
        "1",
        "60.0",
        "1.0",
        "2.0",
        "120",
        "90",
        "5",
        "-",
        "-",
        "6.00",
        "4.00",
    ]
    assert max(map(len, text.split("\nskipped")[0].splitlines())) <= 80


def test_only_what_was_measured_has_a_column_beside_the_published_ladder(job):
    assert "top-1" not in shown(job, results(batches=measured(15.0)))
    rows = rows_of(job, results())
    assert "6.0 times" in against_published(rows)
    assert "21.2 times" in against_published(rows)


def test_json_has_every_rung_its_options_and_the_machine(job):
    content = as_json(job, rows_of(job, results()), MACHINE, 12.34)
    by_name = {rung["name"]: rung for rung in content["rungs"]}
    assert by_name["batches"]["options"] == {"batch": 8}
    assert by_name["batches"]["top1"] == 0.75
    assert by_name["int8"]["speedup_over_previous"] == 4.0
    assert by_name["compile"] == {
        "name": "compile",
        "title": "torch.compile",
        "outcome": "skipped",
        "reason": ODD,
    }
    assert (content["machine"]["versions"]["tandem"], content["weights"]) == ("1", "random")


def test_the_plot_is_svg_with_every_rung_and_always_the_same(job):
    rows = rows_of(job, results())
    svg = draw(rows, "resnet18 & co")
    assert svg == draw(rows, "resnet18 & co")
    texts = {
        "".join(e.itertext()).strip() for e in ET.fromstring(svg).iter() if e.tag[-4:] == "text"
    }
    assert {rung.title for rung in job.rungs} <= texts
    assert "60.0  (6.0x)" in texts
    assert "skipped" in texts


def test_the_page_escapes_what_it_is_told_and_loads_nothing(job):
    rows = rows_of(job, results())
    html = render(as_json(job, rows, MACHINE, 1.0), rows, "resnet18 <at> 64 px").decode()
    assert "no &lt;compiler&gt; [bold] &amp; $x^2$" in html
    assert "<compiler>" not in html
    assert "resnet18 &lt;at&gt; 64 px" in html
    assert "<script" not in html
    assert 'src="http' not in html
    assert "<svg" in html


def test_a_page_of_odd_names_and_one_of_nothing_measured(job):
    rows = rows_of(job, results())
    content = as_json(job, rows, MACHINE, 1.0) | {"weights": "caf\udce9"}
    assert b"weights: caf?." in render(content, rows, "t")
    rows = rows_of(job, {rung.name: RungResult(outcome="failed", reason="x") for rung in job.rungs})
    assert b"failed" in render(as_json(job, rows, MACHINE, 1.0), rows, "t")
