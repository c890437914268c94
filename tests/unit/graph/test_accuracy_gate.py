"""The gate before the graph: what is served, what only when told."""

import logging
from pathlib import Path

import pytest

from app.errors import UnverifiedError
from app.graph.set_checks import check_accuracy
from app.launch.log import service_log
from app.launch.serve import _checked_config
from app.launch.serve_options import ServeOptions
from app.main import build
from app.settings import Settings
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from tests.support.tiny_networks import with_accuracy, write_tiny_set


@pytest.fixture
def dropped(tmp_path: Path) -> Path:
    """A set whose INT8 lost ten points."""
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.9, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"sure": 0.1}))
    return folder


def test_a_dropped_set_is_refused_everywhere(dropped: Path) -> None:
    settings = Settings(model_set=str(dropped))
    with pytest.raises(UnverifiedError, match=r"costs sure 10\.00 points"):
        check_accuracy(settings.load_set(), settings)
    with pytest.raises(UnverifiedError):
        build(settings)  # serve run and serve deploy come this way
    with pytest.raises(UnverifiedError):
        _checked_config(ServeOptions(model_set=str(dropped), port=1))


def test_the_commands_that_are_advised_name_the_set_by_its_folder(dropped: Path) -> None:
    """Nothing of the name in its manifest is to be found here."""
    settings = Settings(model_set=str(dropped))
    with pytest.raises(UnverifiedError) as told:
        check_accuracy(settings.load_set(), settings)
    assert f"(tandem quantize {dropped})" in told.value.message
    assert f"(tandem evaluate {dropped})" in told.value.message


def test_allow_unverified_serves_it_and_says_so(
    dropped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        build(Settings(model_set=str(dropped), allow_unverified=True))
    assert "10.00 points" in caplog.text


def test_the_command_line_passes_it_on(
    dropped: Path, free_port, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ServeOptions(model_set=str(dropped), port=free_port(), allow_unverified=True)
    with service_log("text"):
        config = _checked_config(options)
    assert config.content["applications"][0]["args"]["allow_unverified"] is True
    assert "10.00 points" in capsys.readouterr().err


def test_float_networks_need_no_int8_record(dropped: Path) -> None:
    settings = Settings(model_set=str(dropped), precision="FP16")
    verdict = check_accuracy(settings.load_set(), settings)
    assert verdict.status == "unmeasured"


def test_the_bundled_set_is_verified() -> None:
    from models.model_set import load_model_set

    assert check_accuracy(load_model_set("imagenette"), Settings()).status == "verified"
