"""The distribution: its name and version, and that texts name no stranger's package."""

import re
import tomllib
from pathlib import Path

import pytest

from models.machine import DISTRIBUTION, pip_install
from tandem_client import images as client

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = ("app", "models", "calibration", "client", "configs", "tests", "docs")
TEXTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml", ".toml", "")
    and path.is_file()
    and path != Path(__file__)
)
# On public indexes "tandem" and "tandem-client" are other people's packages.
STRANGERS = re.compile(r"pip install [^\n`]*\btandem(-client)?(\[|['\"`\s]|==)|\btandem-client\b")


def test_names_and_versions_agree_with_each_other_and_the_changelog():
    assert (PROJECT["name"], CLIENT["name"]) == (DISTRIBUTION, client.DISTRIBUTION)
    assert PROJECT["version"] == client.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    newest = next(heading for heading in headings if heading != "Unreleased")
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} \(\d{{4}}-\d\d-\d\d\)", newest)


@pytest.mark.parametrize(("extra", "asked"), PROJECT["optional-dependencies"].items())
def test_an_extra_asks_for_the_projects_own_extras_and_has_its_command(extra, asked):
    assert not [line for line in asked if re.match(r"tandem(\[|$)", line)]
    assert pip_install(extra) == f"pip install 'tandem-serve[{extra}]'"


def test_no_text_installs_a_strangers_package():
    ours = {*ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"}  # that one tells of the old names
    paths = [*TEXTS, *ours, ROOT / "pyproject.toml"]
    assert {
        str(path.relative_to(ROOT)): text[0]
        for path in paths
        if (text := STRANGERS.search(path.read_text("utf-8", "ignore")))
    } == {}
