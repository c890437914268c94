"""A Ray of our own that does not start: what the user is told, and that nothing stays."""

import math
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import worker

from app.errors import ConfigError, NotReadyError
from app.launch import ray_cluster
from app.launch.ray_cluster import (
    MIN_PROCESSES,
    check_processes,
    joined_ray,
    local_ray,
    metrics_urls,
)
from app.stages.threads import Limit

ROOT = Path(__file__).parents[3]
FOLDER = Path("/tmp/of-this-run")
LATE = "The current node timed out during startup. This could happen because some of the raylet"


class Forks:
    """In the place of the fork server."""

    def __init__(self) -> None:
        self.was_asked_to_end = False

    def ask(self) -> None:
        self.was_asked_to_end = True


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    monkeypatch.setattr(ray_cluster, "only_what_one_machine_needs", lambda _: nullcontext())
    monkeypatch.setattr(ray_cluster, "ask_to_end", Forks.ask)
    return Forks()


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray_cluster, "init_ray", init)


@pytest.mark.parametrize(
    ("place", "said"),
    [("tightest_pids_limit", r"pids\.max, 300, leaves 60"), ("user_limit", "-u, 300, leaves 60")],
)
def test_a_limit_of_processes_below_what_ray_needs(monkeypatch, place, said):
    monkeypatch.setattr(ray_cluster, "tightest_pids_limit", lambda: Limit(math.inf, 0))
    monkeypatch.setattr(ray_cluster, "user_limit", lambda: Limit(math.inf, 0))
    check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(300, 240))
    with pytest.raises(ConfigError, match=said):
        check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(240 + MIN_PROCESSES, 240))
    check_processes()


DEATH = """A worker died or was killed while executing a task by an unexpected system error. To \
troubleshoot the problem, check the logs for the dead worker. Lease ID: 0a Worker ID: 1b Node ID: \
2c Worker IP address: 127.0.0.1 Worker port: 37105 Worker PID: 4711 Worker exit type: SYSTEM_ERROR \
Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some \
common causes include: (1) the process was killed by the OOM killer due to high memory usage."""


class OneError:
    """Publishes one error, as Ray's control store does, then nothing."""

    def __init__(self, text: str) -> None:
        self.errors = [{"job_id": None, "error_message": text}]

    def subscribe(self) -> None:
        pass

    def poll(self) -> tuple[None, dict[str, str | None]]:
        if not self.errors:
            raise ConnectionError("over")
        return None, self.errors.pop()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            DEATH,
            "process 4711 of Ray died: Worker unexpectedly exits with a connection error code 2; "
            "of a replica Serve starts another one",
        ),
        ("Something else.\nIt goes on.", "Something else"),
        ("x" * 900, "x" * 200),
    ],
)
def test_a_process_of_rays_that_died_is_told_in_a_line(monkeypatch, capfd, forks, text, told):
    """By Ray's own listener, which prints to the terminal."""
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    monkeypatch.setattr(worker, "_internal_kv_initialized", lambda: False)
    job = SimpleNamespace(binary=lambda: b"job")
    listening = SimpleNamespace(gcs_error_subscriber=OneError(text), current_job_id=job)
    lines: list[str] = []
    with local_ray(0, forks, FOLDER, lines.append):
        worker.listen_error_messages(listening, threading.Event())  # type: ignore[arg-type]
    assert lines == [told]
    assert text[:9] not in "".join(capfd.readouterr())


def test_the_metrics_of_each_node_that_is_alive(monkeypatch):
    nodes = [
        {"Alive": is_alive, "NodeManagerAddress": address, "MetricsExportPort": 9464}
        for address, is_alive in (("10.0.0.1", True), ("10.0.0.2", False), ("fd00::5", True))
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert metrics_urls() == ["http://10.0.0.1:9464/metrics", "http://[fd00::5]:9464/metrics"]


def test_what_ray_raises_is_told_in_a_line(monkeypatch, forks):
    fails(monkeypatch, Exception(LATE))
    told = (
        r"^Ray did not start: The current node timed out during startup\. Much else .* try again$"
    )
    with pytest.raises(NotReadyError, match=told), local_ray(0, forks, FOLDER, print):
        pass
    assert forks.was_asked_to_end


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied", "/tmp/x"), OSError("no space left"), ValueError()],
)
def test_a_busy_machine_is_blamed_only_where_a_time_ran_out(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(NotReadyError) as caught, local_ray(0, forks, FOLDER, print):
        pass
    assert "try again" not in caught.value.message


def test_rays_files_are_in_the_folder_of_the_run(monkeypatch, forks):
    options = {}
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **given: options.update(given))
    with local_ray(0, forks, FOLDER, print):
        assert options["_temp_dir"] == str(FOLDER)


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt()])
def test_what_is_told_already_and_ctrl_c_stay_what_they_are(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(type(error)), local_ray(0, forks, FOLDER, print):
        pass
    assert forks.was_asked_to_end


def test_what_fails_once_it_runs_is_not_the_start(monkeypatch, forks):
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    with pytest.raises(ValueError, match="later"), local_ray(0, forks, FOLDER, print):
        raise ValueError("later")


def test_ray_is_started_and_joined_from_the_projects_own_folder(monkeypatch, forks, tmp_path):
    """Its workers import from there first: not another program's "app" of a working folder."""
    folders = []
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: folders.append(Path.cwd()))
    monkeypatch.setattr(ray_cluster, "check_address", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with local_ray(0, forks, FOLDER, print), joined_ray("auto"):
        assert Path.cwd() == tmp_path
    assert folders == [ROOT, ROOT]


def test_a_working_folder_that_is_gone_stops_nothing(monkeypatch, forks, tmp_path):
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with local_ray(0, forks, FOLDER, print):
        pass


def test_without_a_fork_server_ray_starts_workers_as_it_does(monkeypatch):
    started = []
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **options: started.append(options))
    with local_ray(0, None, FOLDER, print):
        pass
    assert "_system_config" not in started[0]
