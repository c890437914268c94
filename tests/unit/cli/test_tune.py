"""``tandem tune`` itself: once with real processes, else with a search that is over at once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import Result

from app.bench.load import NothingToClassifyError
from app.cli import tune as command
from app.errors import ConfigError
from app.launch.config import ServeConfig
from models.errors import ModelSetError, TandemError
from tests.support.command_line import tandem
from tests.support.points import point
from tests.support.tiny_networks import picture

PROJECT = Path(__file__).parents[3]
POINTS = [
    point(100.0, 80.0, clients=16),
    point(70.0, 40.0, clients=8),
    point(20.0, 15.0, clients=1),
    point(60.0, 60.0, clients=4),
]


@pytest.fixture
def config(tiny_set, tmp_path) -> Path:
    content = yaml.safe_load((PROJECT / "serve_config.yaml").read_text())
    arguments = {"model_set": str(tiny_set), "compile_cache": str(tmp_path / "cache")}
    content["applications"][0]["args"] = arguments
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def measured(monkeypatch) -> None:
    monkeypatch.setattr(command, "_search", lambda *_: (POINTS, 60.0))


@pytest.fixture
def one_core():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def tune(*arguments: object) -> Result:
    return tandem("tune", *arguments)


@pytest.mark.usefixtures("measured")
def test_several_sets_are_refused(config, tiny_set, tmp_path):
    new = tmp_path / "new.yaml"
    error = refusal("--config", config, "--model-set", f"{tiny_set},b", "--write", new)
    assert isinstance(error, ConfigError)
    assert error.message.startswith("tune measures one set, and several are asked for")
    assert not new.exists()


@pytest.mark.usefixtures("measured")
def test_a_folders_name_is_printed_as_it_is(config, tmp_path):
    """Brackets around letters are markup to rich, and ":cat:" is a picture."""
    photos = tmp_path / "photos[b]:cat:"
    photos.mkdir()
    (photos / "a.png").write_bytes(picture("red"))
    assert (
        f"points on 1 photos of {photos} in " in tune("--config", config, "--images", photos).stdout
    )


@pytest.mark.usefixtures("one_core")
def test_a_tiny_set_is_tuned(config, tmp_path):
    photos, new = tmp_path / "photos", tmp_path / "tuned.yaml"
    photos.mkdir()
    for color in ("red", "green"):
        (photos / f"{color}.png").write_bytes(picture(color))
    (photos / "broken.jpg").write_bytes(b"no picture")
    short = ("--seconds", "0.02", "--images", photos)
    done = tune("--config", config, *short, "--write", new, "--json", "-")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    chosen = result["chosen"]
    assert chosen["images_per_s"] > 0
    assert {p["clients"] for p in result["points"]} == {1, 2, 4, 8, 16}
    assert any(p["is_on_front"] for p in result["points"])
    assert result["images"] == f"2 photos of {photos}"
    assert "left out 1 photos" in done.stderr
    arguments = ServeConfig.read(new).content["applications"][0]["args"]
    assert arguments["streams"] == chosen["streams"] == 1
    assert list(arguments["batch_sizes"]) == chosen["batch_sizes"]
    assert result["machine"]["cores"] == 1


def test_ctrl_c_ends_the_children_and_leaves_no_file(config, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    start = [sys.executable, "-c", "from app.cli.main import main; main()", "tune"]
    line = [*start, "--config", str(config), "--write", str(folder / "x.yaml")]
    done = subprocess.Popen(line, cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    try:
        children = _children(done.pid)
        done.send_signal(signal.SIGINT)
        _, said = done.communicate(timeout=30)
    finally:
        done.kill()
    assert done.returncode not in (0, None)
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert list(folder.iterdir()) == []


def _children(pid: int) -> list[psutil.Process]:
    """Wait for replicas: processes that spawn started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(pid).children()
            if any("app.compute.child_process" in " ".join(child.cmdline()) for child in children):
                return children
        time.sleep(0.05)
    raise AssertionError("no replica was started")


@pytest.mark.usefixtures("measured")
def test_the_table_shows_the_front_and_the_choice(config):
    done = tune("--config", config)
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if "1 x 2" in line]
    assert [row.split("│")[5].strip() for row in rows] == ["20.0", "70.0", "100.0"]
    assert ["chosen" in row for row in rows] == [False, False, True]
    assert "HTTP and Ray are not in it" in done.stdout
    assert "differ by" not in done.stdout


def test_a_machine_that_is_busy_is_told(config, monkeypatch):
    busy = [replace(one, spread=0.4) for one in POINTS]
    monkeypatch.setattr(command, "_search", lambda *_: (busy, 60.0))
    assert "differ by 40%" in tune("--config", config).stdout


@pytest.mark.usefixtures("measured")
def test_a_p99_to_keep(config, tmp_path):
    done = tune("--config", config, "--p99-ms", "60", "--write", tmp_path / "x.yaml")
    assert done.exit_code == 0, done.output
    settings = ServeConfig.read(tmp_path / "x.yaml").settings
    assert settings.max_concurrent_requests == 8  # they took 40 ms, more than 60
    assert "tandem serve --config" in done.stderr


@pytest.mark.usefixtures("measured")
def test_a_p99_that_nothing_keeps_is_exit_code_1(config, tmp_path):
    done = tune("--config", config, "--p99-ms", "14", "--write", tmp_path / "x.yaml")
    assert done.exit_code == 1
    assert "the lowest was 15.0 ms, 1 replica of 2 cores" in done.stderr
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.usefixtures("measured")
def test_the_plot_is_drawn(config, tmp_path):
    for p99_ms in ("60", "14"):
        path = tmp_path / f"{p99_ms}.svg"
        tune("--config", config, "--p99-ms", p99_ms, "--plot", path)
        assert "throughput, images/s" in path.read_text()


@pytest.mark.usefixtures("measured")
def test_a_file_that_exists_stays_unless_forced(config, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert "--force" in refusal("--config", config, "--write", path).message
    assert path.read_text() == "mine"
    tune("--config", config, "--write", path, "--force")
    assert ServeConfig.read(path).settings.streams == 1
    assert {file.name for file in tmp_path.iterdir()} == {"base.yaml", "mine.yaml"}


def test_a_file_that_came_meanwhile_stays(config, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    monkeypatch.setattr(command, "_search", lambda *_: (path.write_text("mine"), (POINTS, 60.0))[1])
    assert "--force" in refusal("--config", config, "--write", path).message
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("measured")
def test_an_invalid_configuration_is_never_written(config, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    monkeypatch.setattr(command, "as_yaml", lambda *_: "aplications: []")
    error = refusal("--config", config, "--write", path, "--force")
    assert "did you mean applications" in error.message
    assert path.read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"base.yaml", "mine.yaml"}


@pytest.mark.usefixtures("measured")
def test_the_set_of_the_command_line_is_written(config, tmp_path):
    done = tune("--config", config, "--model-set", "imagenette", "--write", tmp_path / "x.yaml")
    assert done.exit_code == 0, done.output
    assert ServeConfig.read(tmp_path / "x.yaml").settings.model_set == "imagenette"


def refusal(*arguments: object) -> TandemError:
    done = tune(*arguments)
    assert isinstance(done.exception, TandemError), done.output
    return done.exception


@pytest.mark.parametrize("option", ["--p99-ms", "--seconds"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_numbers_that_are_none(option, value):
    assert f"{option} is {float(value)}; it must be" in refusal(option, value).message


def test_photos_that_are_not_there(tmp_path):
    assert isinstance(refusal("--images", tmp_path), NothingToClassifyError)
    assert isinstance(refusal("--images", tmp_path / "no"), NothingToClassifyError)
    (tmp_path / "x.jpg").write_text("no picture")
    assert "none of 1 photos" in refusal("--images", tmp_path).message


def test_sets_and_configurations_that_are_not_there(tmp_path):
    assert isinstance(refusal("--model-set", "no-such-set"), ModelSetError)
    assert isinstance(refusal("--config", tmp_path / "no.yaml"), ConfigError)
    apart = PROJECT / "configs" / "separate.yaml"
    assert "in deployments of their own" in refusal("--config", apart).message


@pytest.mark.parametrize("option", ["--write", "--json", "--plot"])
def test_results_with_nowhere_to_go(option):
    assert "cannot write" in refusal(option, "/no/such/folder/x.svg").message


def test_results_that_would_go_elsewhere_than_thought(tmp_path, config):
    assert "--force" in refusal("--write", config).message
    assert "is no file" in refusal("--write", "-").message
    assert ".png or .svg" in refusal("--plot", tmp_path / "x.pdf").message
