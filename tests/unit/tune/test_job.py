"""The input of a tuning run is what the service would serve."""

from pathlib import Path

import pytest
import yaml

from app.tune.job import prepare
from tests.support.spoilt_golden import both_precisions, spoil_int8

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A set whose INT8 is computed otherwise here."""
    folder = both_precisions(tmp_path / "set")
    spoil_int8(folder, "unsure")
    return folder


def config_of(folder: Path, precision: str) -> Path:
    content = yaml.safe_load((PROJECT / "serve_config.yaml").read_text())
    content["applications"][0]["args"] = {
        "model_set": str(folder),
        "precision": precision,
        "compile_cache": None,
    }
    path = folder.with_name("base.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_auto_is_measured_in_the_precision_that_is_served(wrong, capsys):
    job = prepare(config_of(wrong, "auto"), None, None)
    assert job.settings.precision == "FP16"
    assert job.config.settings.precision == "auto"  # as it is written: decided at each start
    assert "precision auto: FP16 is served, not INT8" in capsys.readouterr().err


def test_what_is_asked_for_is_measured(wrong, capsys):
    assert prepare(config_of(wrong, "INT8"), None, None).settings.precision == "INT8"
    assert capsys.readouterr().err == ""
