"""``tandem ladder`` with the real command: the bundled set from INT8 to the service; Ctrl-C.

Every part has its tests in the fast tier: tests/unit/calibration/ladder.
"""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from models.model_set import load_model_set
from tests.support.services.live_service import TANDEM, drawn_photo, run_tandem
from tests.support.services.processes import EVENTUALLY_S, still_running, title, wait_until

pytestmark = pytest.mark.slow
RUNGS = "eager,int8,ensemble,fast,service"


@pytest.fixture
def images(tmp_path) -> Path:
    """Two drawn photos of every class; what they show is none of them."""
    for number, name in enumerate(load_model_set("imagenette").class_ids or ()):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for index in range(2):
            (folder / f"{index}.jpg").write_bytes(drawn_photo(seed=2 * number + index))
    return tmp_path / "images"


def test_the_bundled_set_as_far_as_the_service(images, tmp_path):
    files = {"--json": tmp_path / "a.json", "--plot": tmp_path / "a.svg"}
    written = [str(part) for pair in files.items() for part in pair]
    options = ["--rungs", RUNGS, "--seconds", "1", "--member", "densenet169", "--images", images]
    run_tandem("ladder", "imagenette", *options, "--work", tmp_path / "work", *written)
    rungs = {rung["name"]: rung for rung in json.loads((tmp_path / "a.json").read_text())["rungs"]}
    assert list(rungs) == RUNGS.split(",")
    assert "no PyTorch source" in rungs["eager"]["reason"]
    for name in ("int8", "ensemble", "fast", "service"):
        assert rungs[name]["num_images"] > 0
        assert rungs[name]["num_labelled"] == 20
        assert 0 < rungs[name]["utilisation"] < 1.2
    # The same images by the same networks and plan, in process and over HTTP.
    assert rungs["service"]["top1"] == rungs["fast"]["top1"]
    assert rungs["service"]["pss_mib"] > rungs["fast"]["pss_mib"]
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_ctrl_c_ends_the_rungs_process_too(tmp_path):
    options: list[str | Path] = ["--rungs", "int8", "--seconds", "600", "--work", tmp_path / "work"]
    running = subprocess.Popen(
        [TANDEM, "ladder", "imagenette", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        parent = psutil.Process(running.pid)

        def has_begun() -> bool:
            assert running.poll() is None
            return any("models.child_process" in title(c) for c in parent.children())

        wait_until(has_begun, EVENTUALLY_S, "a rung's process")
        everything = [parent, *parent.children(recursive=True)]
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=EVENTUALLY_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert "--resume" in told
    assert still_running(everything) == []
    assert not list((tmp_path / "work").rglob("*.partial"))
