"""A Ray of our own that does not start: what the user is told, and that nothing stays."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from app.errors import ConfigError, NotReadyError
from app.launch import ray_cluster
from app.launch.ray_cluster import joined_ray, local_ray

ROOT = Path(__file__).parents[3]
FOLDER = Path("/tmp/of-this-run")
LATE = "The current node timed out during startup. This could happen because some of the raylet"


class Forks:
    """In the place of the fork server."""

    def __init__(self) -> None:
        self.was_asked_to_end = False

    def ask_to_end(self) -> None:
        self.was_asked_to_end = True


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    monkeypatch.setattr(ray_cluster, "only_what_one_machine_needs", lambda _: nullcontext())
    return Forks()


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray_cluster, "init_ray", init)


def test_what_ray_raises_is_told_in_a_line(monkeypatch, forks):
    fails(monkeypatch, Exception(LATE))
    told = (
        r"^Ray did not start: The current node timed out during startup\. Much else .* try again$"
    )
    with pytest.raises(NotReadyError, match=told), local_ray(0, forks, FOLDER):
        pass
    assert forks.was_asked_to_end


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied", "/tmp/x"), OSError("no space left"), ValueError()],
)
def test_a_busy_machine_is_blamed_only_where_a_time_ran_out(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(NotReadyError) as caught, local_ray(0, forks, FOLDER):
        pass
    assert "try again" not in caught.value.message


def test_rays_files_are_in_the_folder_of_the_run(monkeypatch, forks):
    options = {}
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **given: options.update(given))
    with local_ray(0, forks, FOLDER):
        assert options["_temp_dir"] == str(FOLDER)


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt()])
def test_what_is_told_already_and_ctrl_c_stay_what_they_are(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(type(error)), local_ray(0, forks, FOLDER):
        pass
    assert forks.was_asked_to_end


def test_what_fails_once_it_runs_is_not_the_start(monkeypatch, forks):
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    with pytest.raises(ValueError, match="later"), local_ray(0, forks, FOLDER):
        raise ValueError("later")


def test_ray_is_started_and_joined_from_the_projects_own_folder(monkeypatch, forks, tmp_path):
    """Its workers import from there first: not another program's "app" of a working folder."""
    folders = []
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: folders.append(Path.cwd()))
    monkeypatch.setattr(ray_cluster, "check_address", lambda _: None)
    monkeypatch.chdir(tmp_path)
    with local_ray(0, forks, FOLDER), joined_ray("auto"):
        assert Path.cwd() == tmp_path
    assert folders == [ROOT, ROOT]
