"""Another model set is deployed while requests come: none of them fails.

``make test`` has tests/unit/graph/test_availability.py.
"""

import threading
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest
from ray import serve

from app.launch.config import ServeConfig
from app.launch.deploy import deploy
from models.manifest import read_manifest
from tests.support.services.deployed import own_application
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.tiny_networks import picture, write_tiny_set

pytestmark = pytest.mark.slow

CLIENTS = 4
# Requests wait for the slowest stage of the new set. On a busy machine that took over 10 s.
REQUEST_TIMEOUT_S = 60


class Load:
    """Clients that send one photo after another; counts what they are answered."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[str] = Counter()  # model sets, or errors
        self._url, self._is_over = url, threading.Event()

    @contextmanager
    def running(self):
        threads = [threading.Thread(target=self._send) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _send(self) -> None:
        with httpx.Client(timeout=2 * REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not self._is_over.is_set():
                try:
                    answer = client.post(self._url, content=picture("red"))
                except httpx.HTTPError as error:
                    self.answers[repr(error)] += 1
                    continue
                if answer.status_code != 200:
                    self.answers[answer.text] += 1
                elif answer.json()["predictions"][0]["label"] != "mostly red":
                    self.answers["wrong"] += 1
                else:
                    self.answers[answer.json()["model_set"]] += 1


def application(folder, place):
    """Return an application beside the session's own."""
    options = {
        "max_surge_percent": 100,
        "max_ongoing_requests": 128,
        "graceful_shutdown_timeout_s": REQUEST_TIMEOUT_S + 5,
        "ray_actor_options": {"num_cpus": 0.1},
    }
    deployments = [{"name": name, **options} for name in ("Gateway", "Decoder", "sure", "unsure")]
    args = {"members": place, "decoder": place, "batch_sizes": [1, 4], "streams": 1}
    application = own_application(
        "rolled", folder, deployments, **args, request_timeout_s=REQUEST_TIMEOUT_S
    )
    content = {"applications": [application]}
    (fitted,) = ServeConfig.of(content).fitted_to(read_manifest(folder)).as_dict()["applications"]
    return fitted


@pytest.mark.parametrize("place", ["gateway", pytest.param("deployment", marks=pytest.mark.slow)])
def test_no_request_fails_while_the_model_set_changes(served, tmp_path, place):
    """In the fast tier with all stages in one process; tests/unit/graph/test_availability.py has
    what differs when each is a deployment: replicas of both sets beside each other.
    """
    sets = [
        write_tiny_set(tmp_path / name, gains={"sure": 8.0, "unsure": 2.0}, size=size, name=name)
        for name, size in (("before", 16), ("after", 24))
    ]
    first, second = (application(folder, place) for folder in sets)
    roll_out(served, first)
    url = f"{served.url}/rolled/v1/classify"
    wait_until(lambda: answered_by(url) == "before", EVENTUALLY_S, "the first set")
    load = Load(url)
    with load.running():
        wait_until(lambda: load.answers["before"] > 50, EVENTUALLY_S, "load on the first set")
        roll_out(served, second)
        wait_until(lambda: load.answers["after"] > 50, EVENTUALLY_S, "rolled")
        wait_until(lambda: answered_by(url) == "after", EVENTUALLY_S, "rolled")
        wait_until(is_healthy, EVENTUALLY_S, "healthy")
    serve.delete("rolled")
    assert set(load.answers) == {"before", "after"}, load.answers


def roll_out(served, application):
    content = served.config.as_dict()
    content["applications"].append(application)
    deploy(ServeConfig.of(content))


def answered_by(url: str) -> str | None:
    try:
        answer = httpx.post(url, content=picture("red"), trust_env=False)
    except httpx.HTTPError:
        return None
    return answer.json()["model_set"] if answer.status_code == 200 else None


def is_healthy() -> bool:
    return serve.status().applications["rolled"].status == "RUNNING"
