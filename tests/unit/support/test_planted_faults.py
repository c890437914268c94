"""The faults that make mutations plants: of every kind, the same each time, in no file."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.support import planted_faults
from tests.support.planted_faults import PlantingFinder, faults_of, planted, sample

SOURCE = '''
"""Text 1."""
LIMIT = 3


def choose(value: int, names: list[str]) -> str:
    """Return a name."""
    if value < LIMIT:
        return names[0]
    return "" if value == 3 else "late"
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planted_module.py").write_text(SOURCE, "utf-8")
    monkeypatch.setattr(planted_faults, "ROOT", tmp_path)
    return "planted_module.py"


def test_every_kind_of_fault_is_planted(module: str):
    changed = {
        ("comparison turned", "value < LIMIT"): "value <= LIMIT",
        ("comparison turned", "value == 3"): "value != 3",
        ("constant off by one", "0"): "return names[1]",
        ("condition negated", "if value < LIMIT:"): "if not value < LIMIT:",
        ("return dropped", "return names[0]"): "        return\n",
    }
    faults = {(fault.kind, fault.source): fault for fault in faults_of(module)}
    for key, text in changed.items():
        assert text in ast.unparse(planted(faults[key]))
        assert text not in ast.unparse(ast.parse(SOURCE))
    threes = [ast.unparse(planted(fault)) for fault in faults_of(module) if fault.source == "3"]
    assert sorted("LIMIT = 4" in text for text in threes) == [False, True]
    assert not [fault for fault in faults_of(module) if "int" in fault.source]  # types


def test_the_module_is_imported_with_its_fault_and_its_file_stays(module: str, tmp_path: Path):
    (fault,) = [f for f in faults_of(module) if f.source == "value < LIMIT"]
    finder = PlantingFinder(fault)
    sys.meta_path.insert(0, finder)
    try:
        spoilt = importlib.import_module("planted_module")
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("planted_module", None)
    assert spoilt.choose(3, ["early"]) == "early"
    assert (tmp_path / module).read_text("utf-8") == SOURCE


def test_the_sample_is_the_same_each_time_and_has_every_module():
    faults = sample(60, seed=41)
    assert faults == sample(60, seed=41) != sample(60, seed=42)
    assert len(set(faults)) == 60
    assert {fault.module for fault in faults} == set(planted_faults.CORE)
