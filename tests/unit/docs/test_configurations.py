"""configs/README.md lists every configuration, and each command of the table can be given."""

import re
import shlex

import pytest

from tests.support.command_line import options_of
from tests.support.configurations import ROOT, SHIPPED

CONFIGS = ROOT / "configs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (CONFIGS / "README.md").read_text("utf-8").splitlines()
    if line.startswith("| [")
]
COMMANDS = {row[0]: row[2].strip("`") for row in ROWS if row[2].startswith("`")}


def test_every_file_and_folder_has_a_row() -> None:
    assert {len(row) for row in ROWS} == {3}
    assert [row[0] for row in ROWS if not row[2]] == ["[`functions/`](functions)"]
    listed = [re.findall(r"^\[`[^`]+`\]\(([^)]+)\)", row[0])[0] for row in ROWS]
    assert len(set(listed)) == len(listed)
    files = {path.name for path in CONFIGS.glob("*.yaml")}
    assert {name for name in listed if name.endswith(".yaml")} == files
    assert files == {path.name for path in SHIPPED if path.parent == CONFIGS}
    kustomized = {str(p.parent.relative_to(CONFIGS)) for p in CONFIGS.rglob("kubernetes/*/kust*")}
    others = {path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert {name for name in listed if "." not in name} == others - {"kubernetes"} | kustomized


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_what_is_there(name: str) -> None:
    program, *words = shlex.split(COMMANDS[name])
    for path in (word for word in words if word.startswith("configs/")):
        assert (ROOT / path).exists(), path
    if program == "tandem":
        assert {word for word in words if word.startswith("--")} <= options_of(words[0])
    elif program == "kubectl":
        assert words[:2] == ["apply", "-k"]
        assert (ROOT / words[2] / "kustomization.yaml").is_file()
    elif program == "systemctl":
        assert (CONFIGS / "systemd" / f"{words[-1]}.service").is_file()
    else:
        assert program in {"serve", "docker", "haproxy", "prometheus", "import"}


def test_it_is_a_table_and_little_else() -> None:
    text = (CONFIGS / "README.md").read_text("utf-8")
    prose = [line for line in text.splitlines() if line and line[0] not in "|#"]
    assert len(" ".join(prose).split()) <= 100
