"""``tandem environment``: what a shell on a node of a cluster evaluates before ``ray start``.

``tandem serve`` refuses what cannot work, and says what to do, before it starts anything.

A unit test's ``ray.init`` raises: a command that came so far would not end with exit code 2. The
same from outside, with the real command, is in tests/e2e/test_serve_command.py.
"""

import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import ray

from app.cli import main as cli
from app.environment import node_environment, serve_environment
from app.errors import ConfigError
from app.launch.haproxy import max_connections
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.scored_sets import write_scored_set
from tests.support.shipped_config import edited_config
from tests.support.tiny_networks import with_accuracy, write_tiny_set

Refused = Callable[..., str]
OF_A_SET = "model_set: imagenette"
SHARED = "args:\n      shared_memory: unproxied"


def evaluated(text: str) -> dict[str, str]:
    """Return what a shell has in its environment after the text, beside what it had anyway."""
    command = ["env", "-i", "sh", "-c", f"{text}\nexport -p"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.removeprefix("export ") for line in done.stdout.splitlines())
    pairs = (line.partition("=") for line in lines)
    return {name: "".join(shlex.split(value)) for name, _, value in pairs if name != "PWD"}


def test_haproxy_hears_which_pages_may_read_its_answers(tmp_path):
    tandem("environment", "--folder", tmp_path, "--allowed-origin", "https://shop.example")
    assert "-m str https://shop.example }" in (tmp_path / "edits.json").read_text()
    tandem("environment", "--folder", tmp_path)
    assert "https://shop.example" not in (tmp_path / "edits.json").read_text()


@pytest.mark.parametrize("origin", ["https://Shop.example", "https://shop.example/", "a b", ""])
def test_an_origin_that_no_browser_sends_is_refused(tmp_path, origin):
    done = tandem("environment", "--folder", tmp_path, "--allowed-origin", origin)
    assert isinstance(done.exception, ConfigError)
    assert f"--allowed-origin: {origin!r} is no origin: give scheme" in done.exception.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, place):
    (tmp_path / "file").touch()
    result = tandem("environment", "--folder", tmp_path / place)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(f"cannot write {tmp_path / place}: ")
    assert "; give --folder a folder that can be written" in result.exception.message
    assert result.stdout == ""


def test_haproxys_command_is_not_written_where_a_neighbour_can_replace_it(shared_place, neighbour):
    neighbour("mkdir -m 777 tandem")
    result = tandem("environment", "--folder", shared_place / "tandem")
    assert result.exit_code != 0
    assert "another user's (uid 65534); give --folder" in str(result.exception or result.output)
    assert list((shared_place / "tandem").iterdir()) == []


def test_a_shell_gets_the_nodes_environment_and_a_haproxy_that_runs(tmp_path):
    result = tandem("environment", "--folder", tmp_path / "a folder")
    assert result.exit_code == 0
    found = evaluated(result.stdout)
    found.pop("OLDPWD", None)
    assert found.pop("RAY_SERVE_HAPROXY_MAXCONN") == str(max_connections())
    assert found == node_environment(tmp_path / "a folder" / "haproxy")
    tandem("environment", "--folder", tmp_path)
    told = subprocess.run([tmp_path / "haproxy", "-v"], capture_output=True, text=True, check=True)
    assert "HAProxy version" in told.stdout


def test_a_node_shares_nothing_and_sends_again_what_one_machine_does_not(tmp_path):
    node = node_environment(tmp_path / "haproxy")
    one = serve_environment(tmp_path, (1, 2))
    assert not any("_PORT" in name or "_FILE" in name for name in node)
    different = {name for name in node.keys() & one.keys() if node[name] != one[name]}
    buffer, metrics = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"
    draining = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
    assert different == {buffer, metrics, draining}
    assert int(node[buffer]) > int(one[buffer])
    assert int(node[metrics]) < int(one[metrics])
    assert int(one[draining]) < int(node[draining]) < 5  # Ctrl-C of tandem serve --address
    # Whether a request is sent again is our application's affair, in HAProxy's edits.
    repeats = {name for name in node.keys() - one.keys() if "RETR" in name}
    assert repeats == {"RAY_SERVE_HAPROXY_RETRIES"}


@pytest.fixture
def refused(monkeypatch, capsys, free_port) -> Refused:
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
def test_a_model_set_that_is_not_there(refused, name):
    said = refused("--model-set", name)
    assert repr(name) in said
    assert "sets found: imagenette" in said


def test_several_sets_that_could_not_be_told_apart_or_are_not_there(refused, tmp_path):
    folder = write_tiny_set(tmp_path / "tiny")
    assert "model_sets has tiny twice" in refused("--model-set", f"{folder},imagenette,{folder}")
    assert "'nowhere'" in refused("--model-set", "imagenette,nowhere")


@cases(
    "right, misspelt",
    ("http_options", "http_option"),
    ("import_path", "import_pth"),
    ("model_set", "modle_set"),
    ("max_ongoing_requests", "max_ongoing_reqests"),
    ("graceful_shutdown_timeout_s", "graceful_shutdown_timeout"),
)
def test_a_misspelt_key_and_the_right_one(refused, tmp_path, right, misspelt):
    config = edited_config(tmp_path, f"{right}:", f"{misspelt}:")
    said = refused("--config", config)
    assert misspelt in said
    assert f"did you mean {right}?" in said
    assert str(config) in said


@cases(
    "right, written, arguments, says",
    (OF_A_SET, "model_sets: []", "", "at least 1"),
    (OF_A_SET, f"model_sets: [imagenette, x]\n      {OF_A_SET}", "", "leave one of them out"),
    (OF_A_SET, "model_sets: [imagenette, x]\n      members: deployment", "", "members is depl"),
    ("args:", SHARED, "--host 0.0.0.0", "listens on 0.0.0.0"),
    ("args:", SHARED, "--address auto", "with --address"),
)
def test_settings_that_do_not_fit_each_other(refused, tmp_path, right, written, arguments, says):
    assert says in refused("--config", edited_config(tmp_path, right, written), *arguments.split())


@pytest.mark.parametrize("suffix", [".bin", ".xml"])
def test_an_altered_model_file(refused, tmp_path, suffix):
    folder = shutil.copytree(load_model_set("imagenette").folder, tmp_path / "altered")
    victim = next(folder.glob(f"densenet169-int8{suffix}"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = refused("--model-set", folder)
    assert str(victim) in said
    assert "was altered" in said
    assert "restore" in said


def test_a_set_that_lost_too_much(refused, tmp_path):
    folder = write_tiny_set(tmp_path / "dropped", name="dropped")
    top1 = {"sure": 0.9, "unsure": 0.8, "ensemble": 0.9}
    write_manifest(folder, with_accuracy(read_manifest(folder), top1, {"ensemble": 0.02}))
    assert "INT8 costs ensemble 2.00 points" in refused("--model-set", folder)


@cases(
    "setting, says",
    ("plan: fast", "plan is fast, and scored is multi-label: a fast plan needs"),
    ("combine: configs.functions.geometric_mean:geometric_mean", "this set is multi-label"),
)
def test_what_has_no_meaning_for_a_multi_label_set(refused, tmp_path, setting, says):
    folder = write_scored_set(tmp_path / "scored")
    config = edited_config(tmp_path, "args:", f"args:\n      {setting}")
    assert says in refused("--config", config, "--model-set", folder)


def test_a_metrics_port_in_use_where_others_look_for_it(refused, free_port):
    """With --metrics-host no free port is taken instead: a Prometheus would not find it."""
    with socket.create_server(("127.0.0.2", free_port())) as owner:
        host, port = owner.getsockname()
        said = refused("--metrics-host", host, "--metrics-port", port)
    assert f"cannot listen on {host}:{port}" in said
    assert "--metrics-port" in said
