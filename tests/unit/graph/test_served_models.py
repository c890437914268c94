"""What is checked before a set is served: its precision on this machine, and its accuracy."""

import json
import logging
from pathlib import Path

import pytest

from app.errors import ConfigError, UnverifiedError
from app.graph.served_models import check_accuracy, decided, describe
from app.launch.config import ServeConfig
from app.launch.log_and_metrics import service_log
from app.launch.serve import _checked_config
from app.launch.serve_options import ServeOptions
from app.main import build
from app.settings import Settings
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.spoilt_golden import both_precisions, spoil_int8
from tests.support.tiny_networks import with_accuracy, write_tiny_set


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A set of both precisions that answers as where it was made."""
    return both_precisions(tmp_path / "set")


@pytest.fixture
def wrong(good: Path) -> Path:
    """A set whose INT8 is computed otherwise here."""
    spoil_int8(good, "unsure")
    return good


def of(folder: Path, **changes: object) -> Settings:
    return Settings(model_set=str(folder), **({"precision": "auto"} | changes))


def choice(settings: Settings) -> tuple[str, str | None]:
    chosen, warning = decided(settings, settings.load_set())
    assert chosen.model_copy(update={"precision": settings.precision}) == settings
    return chosen.precision, warning


def test_a_fast_plan_is_described_unless_an_own_function_combines() -> None:
    bundled = load_model_set("imagenette")
    plan = describe(bundled, Settings(), []).fast_plan
    assert plan is not None
    assert [step["ask"] for step in plan["steps"]] == [["densenet169"], ["resnet50"]]
    assert describe(bundled, Settings(combine="own:f"), []).fast_plan is None


def test_int8_where_it_answers_as_it_must(good: Path) -> None:
    assert choice(of(good)) == ("INT8", None)


def test_fp16_where_a_members_int8_does_not(wrong: Path) -> None:
    precision, warning = choice(of(wrong))
    assert precision == "FP16"
    assert warning is not None
    assert warning.startswith(
        "precision auto: FP16 is served, not INT8: unsure INT8 does not answer"
    )


def test_one_precision_is_decided_for_several_sets(good: Path, tmp_path: Path) -> None:
    wrong = both_precisions(tmp_path / "wrong")
    spoil_int8(wrong, "unsure")
    right, other = of(good).load_set(), of(wrong).load_set()
    assert decided(of(good), right, right)[1] is None
    chosen, warning = decided(of(good), right, other)
    assert chosen.precision == "FP16"
    assert warning is not None
    assert "unsure INT8 does not answer" in warning


@pytest.mark.parametrize("precision", ["INT8", "FP16"])
def test_what_is_asked_for_is_not_changed(wrong: Path, precision: str) -> None:
    assert choice(of(wrong, precision=precision)) == (precision, None)


def test_float_alone_is_taken(tmp_path: Path) -> None:
    assert choice(of(write_tiny_set(tmp_path / "float", precision="FP16"))) == (
        "FP16",
        "precision auto: FP16 is served, not INT8: sure has no INT8 network.",
    )


def test_without_golden_answers_int8_is_not_doubted(tmp_path: Path) -> None:
    assert choice(of(write_tiny_set(tmp_path / "unchecked"))) == ("INT8", None)


def test_without_float_networks_nothing_is_served(wrong: Path) -> None:
    """As of the wheel's bundled set: its manifest names them, and the files are not there."""
    (wrong / "sure-fp16.bin").unlink()
    with pytest.raises(ModelSetError, match=r"unsure INT8 does not.*no FP16 to take: .*is missing"):
        choice(of(wrong))
    manifest = read_manifest(wrong)
    members = [
        m.model_copy(update={"networks": {"INT8": m.networks["INT8"]}}) for m in manifest.members
    ]
    write_manifest(wrong, manifest.model_copy(update={"members": tuple(members)}))
    with pytest.raises(ModelSetError, match="no FP16 to take: member sure has no FP16 network"):
        choice(of(wrong))


def test_the_command_says_so_and_hands_the_precision_to_all_replicas(
    wrong, free_port, monkeypatch, capsys
):
    monkeypatch.setenv("TANDEM_PRECISION", "auto")
    options = ServeOptions(model_set=str(wrong), port=free_port())
    with service_log("json"):
        config = _checked_config(options)
    assert config.settings.precision == "FP16"
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (line,) = [line for line in lines if "precision auto" in line["message"]]
    assert line["levelname"] == "WARNING"


def test_the_graph_is_built_of_what_was_decided(wrong, caplog):
    """``serve run`` and ``serve deploy`` come this way."""
    with caplog.at_level(logging.WARNING, "ray.serve"):
        build(of(wrong))
    assert "precision auto: FP16 is served" in caplog.text


def test_the_default_is_this_machines_and_others_are_refused() -> None:
    assert Settings().precision == "INT8"  # where the tests run, on x86-64
    content = ServeConfig.read(Path("serve_config.yaml")).as_dict()
    content["applications"][0]["args"] = {"precision": "int8"}
    with pytest.raises(ConfigError, match="precision"):
        ServeConfig.of(content)


# The gate before the graph: what is served, what only when told.


@pytest.fixture
def dropped(tmp_path: Path) -> Path:
    """A set whose INT8 lost ten points."""
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.9, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"sure": 0.1}))
    return folder


def test_a_dropped_set_is_refused_everywhere(dropped: Path) -> None:
    """The commands that are advised name the set by its folder: nothing has its own name here."""
    settings = Settings(model_set=str(dropped))
    with pytest.raises(UnverifiedError, match=r"costs sure 10\.00 points") as refused:
        check_accuracy(settings.load_set(), settings)
    assert f"(tandem quantize {dropped})" in refused.value.message
    assert f"(tandem evaluate {dropped})" in refused.value.message
    with pytest.raises(UnverifiedError):
        build(settings)  # serve run and serve deploy come this way
    with pytest.raises(UnverifiedError):
        _checked_config(ServeOptions(model_set=str(dropped), port=1))


def test_allow_unverified_serves_it_and_says_so(dropped, caplog):
    with caplog.at_level(logging.WARNING, "ray.serve"):
        build(Settings(model_set=str(dropped), allow_unverified=True))
    assert "10.00 points" in caplog.text


def test_the_command_line_passes_it_on(dropped, free_port, capsys):
    options = ServeOptions(model_set=str(dropped), port=free_port(), allow_unverified=True)
    with service_log("text"):
        config = _checked_config(options)
    assert config.content["applications"][0]["args"]["allow_unverified"] is True
    assert "10.00 points" in capsys.readouterr().err


def test_float_networks_need_no_int8_record(dropped: Path) -> None:
    settings = Settings(model_set=str(dropped), precision="FP16")
    assert check_accuracy(settings.load_set(), settings).status == "unmeasured"


def test_the_bundled_set_is_verified() -> None:
    assert check_accuracy(load_model_set("imagenette"), Settings()).status == "verified"
