"""tests/load/README.md has a line for each benchmark; a result's command runs anywhere."""

import re
from pathlib import Path

LOAD = Path(__file__).parents[2] / "load"


def test_commands_have_their_line_and_results_no_folder_of_one_machine():
    assert {
        path.name
        for path in LOAD.glob("*.py")
        if "typer.run(" in (text := path.read_text("utf-8")) or "__main__" in text
    } == set(re.findall(r"`(\w+\.py)`", (LOAD / "README.md").read_text("utf-8")))
    assert {
        f"{path.name}: {line.strip()}"
        for path in (LOAD / "results").glob("*.json")
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"""[ "'=]/\w+/""", line)
    } == set()
