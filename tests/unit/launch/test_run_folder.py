"""The folder of one run: where it is made, and what stays of it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.launch import run_folder as module
from app.launch.run_folder import LOCK, MAX_PLACE, PREFIX, run_folder

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
        assert len(folder) <= MAX_PLACE
        yield Path(folder)


def write_logs(folder: Path) -> None:
    logs = folder / "ray" / "session_2026-11-25_12-00-00_000000_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("why")
    (folder / "ray" / "session_latest").symlink_to(logs.parent)
    (folder / "haproxy.cfg").write_text("")


def fail_with_logs() -> None:
    with run_folder() as folder:
        write_logs(folder)
        raise ConfigError("no")


def test_it_goes_with_the_run(place: Path) -> None:
    with run_folder() as folder:
        write_logs(folder)
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_after_an_error_rays_logs_stay_until_the_next_start(place: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fail_with_logs()
    (folder,) = place.iterdir()
    assert caught.value.__notes__ == [f"Ray's logs are in {folder}/logs until the next start."]
    assert sorted(path.name for path in folder.iterdir()) == ["logs", LOCK]
    assert (folder / "logs" / "raylet.out").read_text() == "why"
    with run_folder() as another:
        assert list(place.iterdir()) == [another]


def test_an_error_before_ray_starts_leaves_nothing(place: Path) -> None:
    with pytest.raises(ConfigError) as caught, run_folder():
        raise ConfigError("no")
    assert not hasattr(caught.value, "__notes__")
    assert list(place.iterdir()) == []


def test_a_killed_runs_folder_is_removed_and_a_living_ones_is_not(place: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert Path(killed.stdout.strip()).is_dir()
    with run_folder() as living, run_folder() as another:
        assert set(place.iterdir()) == {living, another}


@pytest.mark.parametrize("asked", ["/tmp/" + 85 * "x", "/nowhere", "relative"])
def test_another_place_is_taken_where_the_users_does_not_do(
    monkeypatch: pytest.MonkeyPatch, place: Path, asked: str
) -> None:
    """Of 85 characters' length HAProxy's sockets and Ray's would have names that are too long."""
    monkeypatch.setenv("TMPDIR", asked)
    monkeypatch.setattr(module, "PLACES", ("/nowhere either", str(place)))
    with run_folder() as folder:
        assert folder.parent == place


def test_nowhere_to_write_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(module, "PLACES", ("/nowhere", "/nowhere2"))
    told = r"^no folder for this run: /nowhere, /nowhere2 cannot be written to; mount one .*TMPDIR"
    with pytest.raises(ConfigError, match=told), run_folder():
        pass


def test_sockets_fit_below_the_longest_place() -> None:
    """HAProxy takes 97 characters, Unix 107."""
    random, node = 8 * "x", 56 * "0"
    run = f"{MAX_PLACE * 'p'}/{PREFIX}{random}"
    assert len(f"{run}/{node}/admin.sock") <= 97
    assert len(f"{run}/ray/session_2026-11-25_12-00-00_000000_4194304/sockets/plasma_store") <= 107
