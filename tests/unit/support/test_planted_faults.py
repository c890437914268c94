"""The faults that make mutations plants: of every kind, the same each time, in no file."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support import planted_faults
from tests.support.planted_faults import Fault, PlantingFinder, faults_of, planted, sample

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
    assert faults == sample(60, seed=41)
    assert faults != sample(60, seed=42)
    assert len(set(faults)) == 60
    assert {fault.module for fault in faults} == set(planted_faults.CORE)


def test_a_run_goes_on_from_its_results(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What was found is not planted again; what survived is, and is found by a new test."""
    file, planted_now = tmp_path / "results.json", []

    def outcome_of(fault: Fault | None, *_: object) -> str:
        planted_now.append(fault)
        return "survived" if fault is None or (fault.source == "3" and not is_tested) else "found"

    monkeypatch.setattr(planted_faults, "CORE", (module,))
    monkeypatch.setattr(planted_faults, "tests_of", lambda _: [])
    monkeypatch.setattr(planted_faults, "outcome_of", outcome_of)
    monkeypatch.setattr(sys, "argv", ["planted_faults", "--results", str(file)])
    for is_tested in (False, True):
        planted_now.clear()
        planted_faults.main()
        report = json.loads(file.read_text("utf-8"))
        assert json.loads(capsys.readouterr().out) == report
        assert report["found"] == report["planted"] - (0 if is_tested else 2)
    assert [fault.source for fault in planted_now if fault] == ["3", "3"]


def test_every_core_module_has_tests():
    for module in planted_faults.CORE:
        tests = planted_faults.tests_of(module)
        assert tests
        assert all((planted_faults.ROOT / test).exists() for test in tests)


def test_the_neighbours_of_a_module_are_the_other_tests_of_its_package() -> None:
    own = planted_faults.tests_of("app/graph/members.py")
    others = planted_faults.neighbours_of("app/graph/members.py")
    assert "tests/unit/graph/test_cache.py" in others
    assert not {*own} & {*others}
    assert "tests/unit/models/test_image.py" in planted_faults.neighbours_of("models/ensemble.py")
