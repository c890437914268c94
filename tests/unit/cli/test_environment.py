"""``tandem environment``: what a shell on a node of a cluster evaluates before ``ray start``."""

import shlex
import subprocess
from pathlib import Path

import pytest
from ray.serve._private import constants

from app.environment import node_environment, serve_environment
from app.errors import ConfigError
from app.launch.haproxy import max_connections
from tests.support.command_line import tandem


def evaluated(text: str) -> dict[str, str]:
    """Return what a shell has in its environment after the text, beside what it had anyway."""
    done = subprocess.run(
        ["env", "-i", "sh", "-c", f"{text}\nexport -p"], capture_output=True, text=True, check=True
    )
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


def test_a_shell_gets_the_nodes_environment(tmp_path):
    result = tandem("environment", "--folder", tmp_path / "a folder")
    assert result.exit_code == 0
    found = evaluated(result.stdout)
    found.pop("OLDPWD", None)
    assert found.pop("RAY_SERVE_HAPROXY_MAXCONN") == str(max_connections())
    assert found == node_environment(tmp_path / "a folder" / "haproxy")


def test_the_command_that_it_names_can_be_run(tmp_path):
    tandem("environment", "--folder", tmp_path)
    told = subprocess.run([tmp_path / "haproxy", "-v"], capture_output=True, text=True, check=True)
    assert "HAProxy version" in told.stdout


def test_a_node_shares_nothing_and_sends_again_what_one_machine_does_not(tmp_path):
    node = node_environment(tmp_path / "haproxy")
    one = serve_environment(tmp_path, (1, 2))
    assert not any("_PORT" in name or "_FILE" in name for name in node)
    different = {name for name in node.keys() & one.keys() if node[name] != one[name]}
    buffer, metrics = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"
    assert different == {buffer, metrics}
    assert int(node[buffer]) > int(one[buffer])
    assert int(node[metrics]) < int(one[metrics])
    # Whether a request is sent again is our application's affair, in HAProxy's edits.
    assert {name for name in node.keys() - one.keys() if "RETR" in name} == {
        "RAY_SERVE_HAPROXY_RETRIES"
    }


def test_serve_knows_every_variable_that_is_set(tmp_path):
    source = Path(constants.__file__).read_text("utf-8")
    names = {n for n in node_environment(tmp_path) if n.startswith("RAY_SERVE_")}
    assert {n for n in names if f'"{n}"' not in source} == set()
