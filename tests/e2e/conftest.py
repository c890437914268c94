"""One real service for all e2e tests: the real command, the bundled set, a free port."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from models.ensemble import average
from models.image import read_image
from models.model_set import load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions

ROOT = Path(__file__).parent.parent.parent
TANDEM = Path(sys.executable).with_name("tandem")
READY_WITHIN_S = 120  # a loaded CI machine; the benchmark in tests/load measures the real figure


class Service:
    """A ``tandem serve`` of our own; stopped by its pid."""

    def __init__(self, port: int, *arguments: str, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [TANDEM, "serve", "--port", str(port), *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve ended:\n{self.log.read_text()}"
            if "ready at" in self.log.read_text():
                return
            time.sleep(0.2)
        pytest.fail(f"not ready within {READY_WITHIN_S} s:\n{self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def start_service(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Callable[..., Service]]:
    """Start a service with further arguments; every one is stopped at the end."""
    started: list[Service] = []

    def start(*arguments: str) -> Service:
        log = tmp_path_factory.mktemp("serve") / "log.txt"
        service = Service(free_port(), *arguments, log=log)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture(scope="session")
def service(start_service: Callable[..., Service]) -> Service:
    """The running service that the tests share."""
    shared = start_service()
    shared.wait_ready()
    return shared


@pytest.fixture(scope="session")
def service_url(service: Service) -> str:
    return service.url


@pytest.fixture
def client(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=60) as client:
        yield client


def drawn_photo(seed: int = 3, width: int = 640, height: int = 480) -> bytes:
    """Draw a picture with shapes and noise, as JPEG: no photograph is kept in the repository."""
    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), (180, 200, 90), np.uint8)
    cv2.circle(image, (width // 2, height // 2), height // 3, (245, 245, 245), -1)
    for _ in range(40):
        x, y = (int(v) for v in rng.integers(0, (width, height)))
        color = tuple(int(v) for v in rng.integers(0, 256, 3))
        cv2.circle(image, (x, y), int(rng.integers(3, 30)), color, 2)
    noisy = cv2.add(image, rng.integers(0, 20, image.shape, np.uint8))
    return cv2.imencode(".jpg", noisy)[1].tobytes()


@pytest.fixture(scope="session")
def photo() -> bytes:
    return drawn_photo()


@pytest.fixture(scope="session")
def in_process() -> Callable[[bytes], np.ndarray]:
    """Classify without any server: bytes to the ensemble's probabilities (C,)."""
    model_set = load_model_set("imagenette")
    manifest = model_set.manifest
    options = RuntimeOptions(batch_sizes=(1,))
    networks = {
        m.name: CompiledNetwork(model_set.network_path(m.name), options) for m in manifest.members
    }

    def classify(data: bytes) -> np.ndarray:
        image = read_image(data, manifest.image.rule)[np.newaxis]
        rows = {name: network.infer(image) for name, network in networks.items()}
        return average(rows, {m.name: m.weight for m in manifest.members})[0]

    return classify


@pytest.fixture(scope="session")
def photo_label(photo: bytes, in_process: Callable[[bytes], np.ndarray]) -> str:
    """What the networks say to the drawn picture when nothing is served."""
    return load_model_set("imagenette").labels[int(in_process(photo).argmax())]
