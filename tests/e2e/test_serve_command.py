"""``tandem serve``: what cannot work is refused before anything starts; nothing stays behind."""

import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from models.model_set import load_model_set
from tests.support.services.live_service import ROOT, Service
from tests.support.services.processes import (
    descendants,
    listening,
    listening_anywhere,
    run_folder,
    still_running,
    title,
    wait_until,
)

# Python and its imports take 2 s here, Ray 6 s more: what is refused this soon started no Ray.
REFUSED_WITHIN_S = 20
STOPPED_WITHIN_S = 30
SIGNALS = [signal.SIGINT, signal.SIGTERM]

Start = Callable[..., Service]


def refused(service: Service, temp: Path) -> str:
    """Wait for exit code 2; return what was said."""
    sessions = set(temp.glob("ray/session_*"))
    assert service.process.wait(REFUSED_WITHIN_S) == 2, service.log.read_text()
    assert set(temp.glob("ray/session_*")) == sessions, "Ray was started"
    said = service.log.read_text()
    assert said.startswith("tandem: ")
    assert "Traceback" not in said
    return said


def test_a_port_that_is_taken(start_service: Start, temp: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        said = refused(start_service(port=port), temp)
    assert f"127.0.0.1:{port}" in said
    assert f"process {psutil.Process().pid}, {psutil.Process().name()}" in said
    assert "--port" in said


@pytest.mark.parametrize("name", ["imagenet", "./nowhere", "../imagenette"])
def test_a_model_set_that_is_not_there(start_service: Start, temp: Path, name: str) -> None:
    said = refused(start_service("--model-set", name), temp)
    assert repr(name) in said
    assert "sets found: imagenette" in said


def edited_config(folder: Path, old: str, new: str) -> Path:
    """Return a copy of the project's serve_config.yaml with one thing changed."""
    text = (ROOT / "serve_config.yaml").read_text("utf-8")
    whole = rf"(?<!\w){re.escape(old)}"  # no part of another key
    assert re.search(whole, text)
    path = folder / "serve_config.yaml"
    path.write_text(re.sub(whole, new, text, count=1), "utf-8")
    return path


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
    start_service: Start, temp: Path, tmp_path: Path, right: str, misspelt: str
) -> None:
    config = edited_config(tmp_path, f"{right}:", f"{misspelt}:")
    said = refused(start_service("--config", str(config)), temp)
    assert misspelt in said
    assert f"did you mean {right}?" in said
    assert str(config) in said


@pytest.mark.parametrize("suffix", [".bin", ".xml"])
def test_an_altered_model_file(
    start_service: Start, temp: Path, tmp_path: Path, suffix: str
) -> None:
    folder = shutil.copytree(load_model_set("imagenette").folder, tmp_path / "altered")
    victim = next(folder.glob(f"densenet169-int8{suffix}"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = refused(start_service("--model-set", str(folder)), temp)
    assert str(victim) in said
    assert "was altered" in said
    assert "restore" in said


def stop_and_look(service: Service, number: signal.Signals, *, is_for_all: bool = False) -> None:
    """Stop a service; it must be gone soon, with all it started, listened on and wrote."""
    family, folder = descendants(service.process.pid), run_folder(service.process.pid)
    ports = listening(family) | {service.port}
    assert folder.is_dir()
    started = time.monotonic()
    code = service.stop(number, is_for_all=is_for_all)
    took = time.monotonic() - started
    said = service.log.read_text()
    assert code == 0, said
    assert took < STOPPED_WITHIN_S
    assert still_running(family) == []
    assert listening_anywhere(ports) == set()
    assert not folder.exists()
    assert "Traceback" not in said
    assert "nothing of it is left running" in said
    assert "raylet" not in said, "Ray's own words on the way down are no user's business"


@pytest.mark.parametrize("is_for_all", [False, True], ids=["alone", "to all"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_all_of_it(
    start_service: Start, number: signal.Signals, is_for_all: bool
) -> None:
    """``kill`` signals the command alone; a terminal's Ctrl-C and systemd all that it started."""
    service = start_service()
    service.wait_ready()
    assert len(descendants(service.process.pid)) > 8
    stop_and_look(service, number, is_for_all=is_for_all)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", ["raylet", "ray::ServeController"])
def test_a_signal_during_the_start_does_too(
    start_service: Start, number: signal.Signals, moment: str
) -> None:
    service = start_service()
    wait_until(lambda: is_there(moment, service), 60, moment)
    assert "ready" not in service.log.read_text()
    stop_and_look(service, number)


def is_there(name: str, service: Service) -> bool:
    return any(name in title(process) for process in descendants(service.process.pid))


def test_an_impatient_user_leaves_nothing_behind(start_service: Start) -> None:
    service = start_service()
    service.wait_ready()
    family, folder = descendants(service.process.pid), run_folder(service.process.pid)
    for _ in range(5):
        service.process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # as fast as fingers are
    assert service.process.wait(STOPPED_WITHIN_S) == 0
    assert still_running(family) == []
    assert not folder.exists()


def test_two_services_at_once(
    service: Service, start_service: Start, photo: bytes, photo_label: str
) -> None:
    other = start_service()
    other.wait_ready()
    ports = [listening(descendants(one.process.pid)) for one in (service, other)]
    # Serve's proxies set SO_REUSEPORT: a port of both would answer with either's networks.
    assert not set.intersection(*ports)
    for url in (service.url, other.url):
        answer = httpx.post(f"{url}/v1/classify", content=photo, timeout=60)
        assert answer.json()["predictions"][0]["label"] == photo_label
    assert other.stop() == 0
    answer = httpx.post(f"{service.url}/v1/classify", content=photo, timeout=60)
    assert answer.json()["predictions"][0]["label"] == photo_label
