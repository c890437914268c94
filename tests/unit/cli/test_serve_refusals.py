"""``tandem serve`` refuses what cannot work, and says what to do, before it starts anything.

A unit test's ``ray.init`` raises: a command that came so far would not end with exit code 2. The
same from outside, with the real command, is in tests/e2e/test_serve_command.py.
"""

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from app.cli import main as cli
from calibration.sets.durable import write_manifest
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.scored_sets import write_scored_set
from tests.support.shipped_config import edited_config
from tests.support.tiny_networks import with_accuracy, write_tiny_set

Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free_port: Callable[[], int],
) -> Refused:
    """Run the command with these arguments; it must be refused; return what it says."""

    def refused(*arguments: object) -> str:
        given = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["tandem", "serve", "--port", str(free_port()), *given])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 2
        # With an older Ray, a line before it names what is left out.
        left_out = f"Ray {ray.__version__}: "
        lines = capsys.readouterr().err.splitlines(keepends=True)
        said = "".join(line for line in lines if not line.startswith(left_out))
        assert said.startswith("tandem: ")
        assert "Traceback" not in said
        return said

    return refused


@pytest.mark.parametrize("name", ["imagenet", "./nowhere", "../imagenette"])
def test_a_model_set_that_is_not_there(refused: Refused, name: str) -> None:
    said = refused("--model-set", name)
    assert repr(name) in said
    assert "sets found: imagenette" in said


def test_several_sets_that_could_not_be_told_apart_or_are_not_there(
    refused: Refused, tmp_path: Path
) -> None:
    write_tiny_set(tmp_path / "tiny")
    assert "model_sets has tiny twice" in refused(
        "--model-set", f"{tmp_path}/tiny,imagenette,{tmp_path}/tiny"
    )
    assert "'nowhere'" in refused("--model-set", "imagenette,nowhere")
    for written, says in (
        ("model_sets: []", "at least 1"),
        ("model_sets: [imagenette, other]\n      model_set: imagenette", "leave one of them out"),
        ("model_sets: [imagenette, other]\n      members: deployment", "members is deployment"),
    ):
        config = edited_config(tmp_path, "model_set: imagenette", written)
        assert says in refused("--config", config)


@pytest.mark.parametrize(
    ("right", "misspelt"),
    [
        ("http_options", "http_option"),
        ("import_path", "import_pth"),
        ("model_set", "modle_set"),
        ("max_ongoing_requests", "max_ongoing_reqests"),
        ("graceful_shutdown_timeout_s", "graceful_shutdown_timeout"),
    ],
)
def test_a_misspelt_key_and_the_right_one(
    refused: Refused, tmp_path: Path, right: str, misspelt: str
) -> None:
    config = edited_config(tmp_path, f"{right}:", f"{misspelt}:")
    said = refused("--config", config)
    assert misspelt in said
    assert f"did you mean {right}?" in said
    assert str(config) in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--host", "0.0.0.0"), "listens on 0.0.0.0"), (("--address", "auto"), "with --address")],
)
def test_shared_memory_where_callers_may_be_elsewhere(
    refused: Refused, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    config = edited_config(tmp_path, "args:", "args:\n      shared_memory: unproxied")
    assert says in refused("--config", config, *arguments)


@pytest.mark.parametrize("suffix", [".bin", ".xml"])
def test_an_altered_model_file(refused: Refused, tmp_path: Path, suffix: str) -> None:
    folder = shutil.copytree(load_model_set("imagenette").folder, tmp_path / "altered")
    victim = next(folder.glob(f"densenet169-int8{suffix}"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = refused("--model-set", folder)
    assert str(victim) in said
    assert "was altered" in said
    assert "restore" in said


def test_a_set_that_lost_too_much(refused: Refused, tmp_path: Path) -> None:
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.8, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"ensemble": 0.02}))
    assert "INT8 costs ensemble 2.00 points" in refused("--model-set", folder)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("cascade_margin: 0.5", "cascade_margin is 0.5, and scored is multi-label"),
        ("combine: configs.functions.geometric_mean:geometric_mean", "this set is multi-label"),
    ],
)
def test_what_has_no_meaning_for_a_multi_label_set(
    refused: Refused, tmp_path: Path, setting: str, says: str
) -> None:
    folder = write_scored_set(tmp_path / "scored")
    config = edited_config(tmp_path, "args:", f"args:\n      {setting}")
    assert says in refused("--config", config, "--model-set", folder)


def test_a_metrics_port_in_use_where_others_look_for_it(
    refused: Refused, free_port: Callable[[], int]
) -> None:
    """With --metrics-host no free port is taken instead: a Prometheus would not find it."""
    with socket.create_server(("127.0.0.2", free_port())) as owner:
        host, port = owner.getsockname()
        said = refused("--metrics-host", host, "--metrics-port", port)
    assert f"cannot listen on {host}:{port}" in said
    assert "--metrics-port" in said
