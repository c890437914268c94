"""ARCHITECTURE.md names what is there, and all of it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "ARCHITECTURE.md").read_text("utf-8")


def rows() -> list[set[str]]:
    """The first column of the table of packages, a set of names per line."""
    section = TEXT.split("## The packages of app")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return [set(re.findall(r"`([a-z_]+)`", cell)) for cell in cells]


def test_the_table_has_the_layers_in_their_order() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    by_id = {each["id"]: each for each in config["tool"]["importlinter"]["contracts"]}
    assert rows() == [set(re.split(r"\W+", layer)) for layer in by_id["layers"]["layers"]]


def test_the_table_has_every_package_and_module() -> None:
    there = {path.parent.name for path in (ROOT / "app").glob("*/__init__.py")}
    there |= {path.stem for path in (ROOT / "app").glob("*.py")} - {"__init__"}
    assert set().union(*rows()) == there


def test_calibrations_packages_are_named() -> None:
    packages = {path.parent.name for path in (ROOT / "calibration").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`([a-z_]+)`", TEXT))


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*/[a-z_]+\.(?:py|md|toml|yaml))`", TEXT)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).is_file() or (ROOT / "app" / name).is_file(), name


def test_each_package_says_what_it_is() -> None:
    for path in (p for of in ("app", "calibration") for p in (ROOT / of).rglob("__init__.py")):
        first = path.read_text("utf-8").splitlines()[0]
        assert first.startswith('"""'), path
        assert len(first) > 30, path
