"""``tandem doctor``: the checks of a start as a table and as JSON, without a start."""

import json
import os
import socket
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from app.cli import serve as command
from tests.support.command_line import tandem
from tests.support.tiny_networks import write_tiny_set


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back the variables that a start sets."""
    with patch.dict(os.environ):
        yield


def findings(*arguments: object, exit_code: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Return state and text of each finding, by what it is about."""
    done = tandem("doctor", "--json", *arguments)
    assert done.exit_code == exit_code, done.output
    content = json.loads(done.stdout)
    assert content["would_start"] == (exit_code == 0)
    by_subject: dict[str, list[tuple[str, str]]] = {}
    for row in content["findings"]:
        by_subject.setdefault(row["about"], []).append((row["state"], row["text"]))
    return by_subject


def test_a_machine_that_can_serve(free_port):
    found = findings("--port", port := free_port())
    assert found["ports"] == [("good", f"127.0.0.1: HTTP {port}")]
    ((state, record),) = found["set"]
    assert state == "good"
    assert record.startswith("imagenette: measured on imagenette/eval, 1451 images")
    assert record.endswith("; INT8 of resnet50, densenet169")
    assert not [state for rows in found.values() for state, _ in rows if state == "error"]


def test_what_serve_warns_of_is_a_finding(tmp_path, monkeypatch, free_port):
    monkeypatch.setenv("TANDEM_MODEL_SET", str(write_tiny_set(tmp_path / "tiny")))
    monkeypatch.setenv("TANDEM_MODLE", "x")
    found = findings("--port", free_port())
    assert found["set"] == [("good", "tiny; INT8 of sure, unsure")]
    said = " ".join(text for state, text in found["start"] if state == "warning")
    assert "TANDEM_MODLE is no setting" in said
    assert "tiny has no accuracy record of INT8" in said


def test_what_serve_refuses_is_an_error_with_exit_code_1(free_port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tandem("doctor", "--port", port, columns=80)
    assert done.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stdout
    assert done.stdout.endswith("tandem serve would not start\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    ((state, text),) = findings("--model-set", "nothing", exit_code=1)["start"]
    assert (state, text[:23]) == ("error", "no model set 'nothing':")


@pytest.mark.parametrize(
    ("model", "state"), [("CPU (avx2)", "warning"), ("CPU (avx2 avx512_vnni)", "good")]
)
def test_a_cpu_without_instructions_for_int8_is_slow(monkeypatch, free_port, model, state):
    monkeypatch.setattr(command, "cpu_model", lambda: model)
    assert findings("--port", free_port())["CPU"][0][0] == state
