"""``tandem evaluate --subsets`` on a tiny set and pictures."""

import json
import sys

import pytest
import yaml

from app.settings import Settings
from calibration.evaluation.subsets import measure_costs
from models.machine import MissingExtraError
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.runtime_files import write_mixed_set
from tests.support.tiny_networks import write_pictures, write_tiny_set


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("data") / "eval", num_per_color=7)


def test_the_command(tmp_path, pictures):
    folder = write_tiny_set(tmp_path / "set")
    out, plot, page = (tmp_path / name for name in ("out.json", "plot.svg", "page.html"))
    result = evaluated(
        folder, "--images", pictures, "--subsets", "--plot", plot, "--json", out, "--html", page
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["subsets"]
    assert found["num_fitted"] + found["num_judged"] == 21
    assert {e["name"] for e in found["ensembles"] if e["cascade_margin"] is None} == {
        "sure",
        "unsure",
        "sure + unsure, average",
        "sure + unsure, logistic",
    }
    assert all(e["top1"] == 1 for e in found["ensembles"])
    assert all(member["cpu_ms_per_image"] > 0 for member in found["members"].values())
    lines = found["suggested"]["setting"]  # one member does: both are always right
    weights = Settings.model_validate(yaml.safe_load("\n".join(lines))).weights
    assert weights is not None
    (name,) = weights
    assert found["suggested"]["name"] == name
    block = found["suggested"]["block"]
    assert block in result.stdout
    settings = Settings.model_validate(yaml.safe_load(block)["args"])
    assert settings.load_set().folder == folder.resolve()
    assert plot.read_text().startswith("<svg")
    assert "Which ensemble is worth it" in page.read_text()


def test_the_precision_that_is_served_is_compared(tmp_path, pictures):
    folder = two_precisions(tmp_path / "set")
    out = tmp_path / "out.json"
    result = evaluated(folder, "--images", pictures, "--subsets", "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["subsets"]["precision"] == "INT8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plot", "plot.svg"], "--plot draws what --subsets compares: give both"),
        (["--subsets", "--plot", "plot.pdf"], "ends in .svg or .png"),
        (
            ["--subsets", "--plot", "nowhere/plot.svg"],
            "in a folder that can be written",
        ),
        (["--html", "-"], "--html - is no file; name one"),
        (["--subsets", "--plot", "-"], "--plot - is no file; name one"),
        (["--subsets", "--max-images", "1"], "1 are too few; give more"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, pictures, options, says):
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_set(tmp_path / "set")
    before = (folder / "manifest.yaml").read_text()
    result = evaluated(folder, "--images", pictures, *options)
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert (folder / "manifest.yaml").read_text() == before


@pytest.mark.parametrize("options", [["--html", "x.html"], ["--subsets", "--plot", "x.svg"]])
def test_what_draws_is_missed_before_anything_is_measured(tmp_path, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "calibration.evaluation.report_page", raising=False)
    done = evaluated(tmp_path / "no set", "--images", tmp_path, *options)
    assert isinstance(done.exception, MissingExtraError)
    assert "tandem evaluate --html and --plot needs matplotlib" in done.exception.message


def test_members_of_another_runtime(tmp_path, pictures):
    folder = write_mixed_set(tmp_path / "set", runtimes=("openvino", "onnxruntime"))
    out = tmp_path / "out.json"
    result = evaluated(folder, "--images", pictures, "--subsets", "--json", out)
    assert result.exit_code == 0, result.exception
    members = json.loads(out.read_text())["subsets"]["members"]
    assert set(members) == {"openvino", "onnxruntime"}
    assert all(member["cpu_ms_per_image"] > 0 for member in members.values())


def test_one_member_has_no_subsets(tmp_path, pictures):
    folder = write_tiny_set(tmp_path / "set", gains={"only": 4.0})
    result = evaluated(folder, "--images", pictures, "--subsets")
    assert result.exit_code != 0
    assert "2 to 8 members; this set has 1 (only)" in str(result.exception)


def test_a_member_that_works_more_costs_more(tmp_path):
    light = write_tiny_set(tmp_path / "light", gains={"a": 4.0}, size=64)
    heavy = write_tiny_set(tmp_path / "heavy", gains={"a": 4.0}, size=64, num_convolutions=4)
    costs = [measure_costs(load_model_set(str(f)), "INT8")["a"] for f in (light, heavy)]
    assert costs[1].cpu_ms > 2 * costs[0].cpu_ms
    assert costs[1].memory_mb >= 0
