"""The faults of ``make mutations`` apply to the code of today: tests/support/planted_faults.py."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import planted_faults
from tests.support.cases import cases
from tests.support.planted_faults import CORE, FOUND, ROOT, Fault, drawn, known_faults, planted

FAULTS = known_faults()
MODULES = sorted({fault.module for fault in FAULTS})


@pytest.mark.parametrize("module", MODULES)
def test_faults_are_of_code_that_is_there_and_change_it(module: str) -> None:
    before = ast.dump(ast.parse((ROOT / module).read_text("utf-8")))
    for fault in (fault for fault in FAULTS if fault.module == module):
        assert ast.dump(ast.parse(planted(fault))) != before, fault.text
        assert (ROOT / fault.test).is_file(), f"{fault.test} has moved: name its file of today"


def test_every_core_module_has_faults_of_its_own() -> None:
    assert {fault.outcome for fault in FAULTS} <= {None, "survived", *FOUND}
    assert len({(fault.module, fault.text, fault.planted) for fault in FAULTS}) == len(FAULTS)
    without = {*CORE} - {*MODULES}
    assert not without, f"add a fault of each: python -m {planted_faults.__name__} --draw MODULE"


@cases("text, num", ("is_late = True", 0), ("late = now", 2))
def test_a_fault_of_code_that_has_moved_is_refused(
    text: str, num: int, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "clock.py").write_text("late = now\nvery_late = now\n", "utf-8")
    monkeypatch.setattr(planted_faults, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=f"clock.py has {num} times, not once: '{text}'"):
        planted(Fault("clock.py", "comparison turned", text, "0", ""))


@cases("module", "app/graph/availability.py", "app/queueing/fairness.py")
def test_drawn_faults_apply_and_are_the_same_each_time(module: str) -> None:
    faults = drawn(module)
    assert len(faults) == 10
    assert faults == drawn(module)
    for fault in faults:
        ast.parse(planted(fault))
        assert planted(replace(fault, planted=fault.text)) == (ROOT / module).read_text("utf-8")
