"""docs/ is what its commands write from the committed figures."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENT, FIGURES = ROOT / "docs/protocols.md", ROOT / "tests/load/results/protocols.json"


def test_the_study_of_protocols_is_written_from_its_figures(tmp_path):
    written = tmp_path / "protocols.md"
    command = [sys.executable, ROOT / "tests/load/protocols.py", "--from", FIGURES]
    subprocess.run([*command, "--document", written], check=True)
    assert written.read_text("utf-8") == DOCUMENT.read_text("utf-8")
    names = {path.name for path in (tmp_path / "protocols").iterdir()}
    assert names == {path.name for path in DOCUMENT.with_suffix("").iterdir()}
    assert all(f"(protocols/{name})" in written.read_text("utf-8") for name in names)


def test_what_is_said_of_the_ladder_is_in_its_result():
    told = " ".join((ROOT / "calibration/README.md").read_text("utf-8").split())
    result = json.loads((ROOT / "docs/ladder/resnet50.json").read_text("utf-8"))
    rates = {r["name"]: r["images_per_s"] for r in result["rungs"] if "images_per_s" in r}
    eager, int8, service = (f"{rates[name]:.0f}" for name in ("eager", "int8", "service"))
    assert f"{eager} images/s eagerly, one by one; {int8} in INT8; {service} through" in told


def test_what_is_said_of_the_tflite_set_is_in_its_result():
    told = (ROOT / "calibration/README.md").read_text("utf-8")
    result = json.loads((ROOT / "tests/load/results/mobilenets.json").read_text("utf-8"))
    v2, v1, small, ensemble = (
        f"{result['scores']['INT8'][name]['top1']:.3f}"
        for name in ("v2", "v1", "small", "ensemble")
    )
    assert f"{v2}, {v1}, {small} on 1,000 photographs; their average {ensemble}" in told
