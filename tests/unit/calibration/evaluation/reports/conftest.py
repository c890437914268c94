"""Sets to report on."""

from pathlib import Path

import pytest

from models.model_set import ModelSet
from tests.support.calibration.made_evaluations import HOSTILE, model_set_of


@pytest.fixture
def both(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set")


@pytest.fixture
def hostile(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set", HOSTILE)
