"""A real ``tandem serve`` in a process of its own, other commands, and a picture to send."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
import yaml

from tests.support.services.ends_with_parent import ending_with_parent
from tests.support.services.processes import wait_until

ROOT = Path(__file__).parents[3]
TANDEM = Path(sys.executable).with_name("tandem")
# The same networks in another process: only the batch size (padding) and the number of threads may
# differ, which changes the order of additions. float32 at 0..1 keeps 1e-7; deep networks widen it.
SAME_PROBABILITY = 1e-4
COMMAND_WITHIN_S = 300
READY_WITHIN_S = 300  # a loaded CI machine; the benchmark in tests/load measures the real figure


Start = Callable[..., "Service"]  # with the arguments of the command


class Service:
    """A ``tandem serve`` of our own; stopped by its pid, or when this process ends."""

    def __init__(self, port, *arguments, log, temp=None, command=(), folder=ROOT, environment=None):
        """Start it: by another ``command`` if one is named, which knows the port by itself."""
        self.port, self.url, self.log = port, f"http://127.0.0.1:{port}", log
        self.ready_after_s = 0.0
        self._started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ending_with_parent(command or [TANDEM, "serve", "--port", str(port), *arguments]),
                cwd=folder,
                env=environment or os.environ | ({"TMPDIR": str(temp)} if temp else {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve ended:\n{self.log.read_text()}"
            if "ready at" in self.log.read_text():
                self.ready_after_s = time.monotonic() - self._started
                return
            time.sleep(0.2)
        pytest.fail(f"not ready within {READY_WITHIN_S} s:\n{self.log.read_text()}")

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        return False

    def wait_answering(self) -> None:
        """Wait until it is ready by its own word: the command may not say so."""
        what = f"{self.url} is ready"
        wait_until(lambda: self.is_ready() or self.process.poll() is not None, READY_WITHIN_S, what)
        assert self.process.poll() is None, self.log.read_text()

    def label(self, photo: bytes) -> str:
        """Return what it calls a photo."""
        return label_at(self.url, photo)

    @property
    def metrics_url(self) -> str:
        """Where its metrics are, as the log says."""
        found = re.search(r"metrics: (http://\S+/metrics)", self.log.read_text())
        assert found
        return found[1]

    def send(self, number: signal.Signals, *, is_for_all: bool = False) -> None:
        """Signal the command alone, as ``kill`` does, or all that it started.

        The latter is what a terminal's Ctrl-C and systemd do.
        """
        (os.killpg if is_for_all else os.kill)(self.process.pid, number)

    def stop(self) -> int:
        """Stop it if it runs; return the exit code."""
        if self.process.poll() is None:
            self.send(signal.SIGINT)
        return self.process.wait(60)


def label_at(url: str, photo: bytes) -> str:
    answer = httpx.post(f"{url}/v1/classify", content=photo, timeout=60)
    return str(answer.raise_for_status().json()["predictions"][0]["label"])


def run_tandem(*arguments, exit_code=0, **variables):
    """Run a command in a process of its own; it must end with ``exit_code``, if there is one."""
    done = subprocess.run(
        [TANDEM, *map(str, arguments)],
        env=os.environ | {"COLUMNS": "140"} | variables,
        capture_output=True,
        text=True,
        timeout=COMMAND_WITHIN_S,
    )
    assert exit_code in (None, done.returncode), done.stdout + done.stderr
    return done


def tandem_of(home: Path, *arguments: object, exit_code: int = 0) -> str:
    """Run a command of somebody whose model sets are below ``home``; return what it says."""
    return run_tandem(*arguments, exit_code=exit_code, XDG_DATA_HOME=str(home)).stdout


def live_report(url: str, *arguments: object, home: Path | None = None) -> dict[str, Any]:
    """Evaluate a service that must answer every image as its networks do without it."""
    variables: dict[str, Any] = {"XDG_DATA_HOME": str(home)} if home else {}
    done = run_tandem("evaluate", *arguments, "--url", url, "--json", "-", **variables)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["live"]["num_same"] == report["num_images"]
    return report


@contextlib.contextmanager
def changed_config(folder: Path, name: str = "serve_config.yaml") -> Iterator[dict[str, Any]]:
    """Give one of the project's configurations to change; it is written to ``folder`` after."""
    content = yaml.safe_load((ROOT / name).read_text("utf-8"))
    yield content
    (folder / Path(name).name).write_text(yaml.safe_dump(content), "utf-8")


def traced_config(folder: Path, endpoint: str) -> Path:
    """Return serve_config.yaml, but for where traces go, shared memory and pages of all origins."""
    with changed_config(folder) as content:
        arguments = {
            "trace_endpoint": endpoint,
            "shared_memory": "unproxied",
            "allowed_origins": ["*"],
        }
        content["applications"][0]["args"] |= arguments
    return folder / "serve_config.yaml"


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
