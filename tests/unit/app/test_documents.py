"""docs/ is what its commands write from the committed figures."""

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
