"""Draining asks a controller, which may be well, slow or silent; real actors play it."""

import threading
import time
from typing import Any

import pytest
import ray

from app import draining

LIMIT_S = 0.5


@ray.remote(num_cpus=0, max_concurrency=2)
class Controller:
    """Knows one application, which goes a while after it was deleted."""

    def __init__(self, takes_s: float, *, is_silent: bool = False) -> None:
        self._takes_s, self._is_silent = takes_s, is_silent
        self._deleted_at: float | None = None

    def get_serve_instance_details(self) -> dict[str, Any]:
        if self._is_silent:
            time.sleep(60)
        is_gone = self._deleted_at is not None and time.time() - self._deleted_at > self._takes_s
        return {"applications": {} if is_gone else {"tandem": {}}}

    def delete_apps(self, names: list[str]) -> None:
        assert names == ["tandem"]
        self._deleted_at = time.time()


class Client:
    """As much of Serve's client as is asked."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def delete_apps(self, names: list[str], *, blocking: bool) -> None:
        assert not blocking
        self._controller.delete_apps.remote(names)


def drained(controller: Any, timeout_s: float) -> float:
    """Return how long draining took; no thread of it may be left, to be in Ray when Ray ends."""
    ray.get(controller.__ray_ready__.remote())
    before, started = threading.active_count(), time.monotonic()
    draining.drain(Client(controller), timeout_s)
    took_s = time.monotonic() - started
    assert threading.active_count() <= before
    return took_s


@pytest.mark.usefixtures("cluster")
def test_it_waits_until_the_applications_are_gone() -> None:
    assert 0.5 <= drained(Controller.remote(0.5), timeout_s=30) < 20


@pytest.mark.usefixtures("cluster")
def test_it_waits_no_longer_than_it_may() -> None:
    assert 1 <= drained(Controller.remote(3600), timeout_s=1) < 20


@pytest.mark.usefixtures("cluster")
def test_a_silent_controller_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "ANSWERS_WITHIN_S", LIMIT_S)
    assert LIMIT_S <= drained(Controller.remote(0, is_silent=True), timeout_s=30) < 20


@pytest.mark.usefixtures("cluster")
def test_a_dead_controller_is_given_up() -> None:
    controller = Controller.remote(0)
    ray.get(controller.__ray_ready__.remote())
    ray.kill(controller)
    started = time.monotonic()
    draining.drain(Client(controller), 30)
    assert time.monotonic() - started < 20
