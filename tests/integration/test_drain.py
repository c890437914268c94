"""Draining asks a controller, which may be well, slow or silent; real actors play it."""

import threading
import time
from typing import Any

import pytest
import ray

from app.launch import ray_cluster
from tests.support.cases import cases

LIMIT_S = 0.5
LONG_S = 600.0  # until who waits that long is given up
SOON_S = 200.0  # it did not wait so long, on however busy a machine


class Controller:
    """Knows one application, which goes a while after it was deleted."""

    def __init__(self, takes_s: float, *, is_silent: bool = False) -> None:
        self._takes_s, self._is_silent = takes_s, is_silent
        self._deleted_at: float | None = None

    def get_serve_instance_details(self) -> dict[str, Any]:
        if self._is_silent:
            time.sleep(3600)
        is_gone = self._deleted_at is not None and time.time() - self._deleted_at > self._takes_s
        return {"applications": {} if is_gone else {"tandem": {}}}

    def delete_apps(self, names: list[str]) -> None:
        assert names == ["tandem"]
        self._deleted_at = time.time()


def remote_controller(takes_s: float, *, is_silent: bool = False) -> Any:
    actor: Any = ray.remote(Controller)
    return actor.options(num_cpus=0, max_concurrency=2).remote(takes_s, is_silent=is_silent)


class Client:
    """As much of Serve's client as is asked."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def delete_apps(self, names: list[str], *, blocking: bool) -> None:
        assert not blocking
        self._controller.delete_apps.remote(names)


def drained(controller: Any, timeout_s: float) -> tuple[bool, float]:
    """Return whether it answered, and how long draining took.

    No thread of it may be left: it could be in Ray when Ray ends.
    """
    ray.get(controller.__ray_ready__.remote())
    before, started = threading.active_count(), time.monotonic()
    has_answered = ray_cluster.drain(Client(controller), timeout_s)
    took_s = time.monotonic() - started
    assert threading.active_count() <= before
    return has_answered, took_s


@pytest.mark.usefixtures("cluster")
@cases(
    "takes_s, is_silent, answers_within_s, timeout_s, least_s",
    # On a busy machine a controller that is well may take longer than its three seconds.
    pytest.param(0.5, False, SOON_S, LONG_S, 0.5, id="until the applications are gone"),
    pytest.param(3600, False, SOON_S, 1, 1, id="no longer than it may"),
    pytest.param(0, True, LIMIT_S, LONG_S, LIMIT_S, id="a silent controller is given up"),
)
def test_it_waits(monkeypatch, takes_s, is_silent, answers_within_s, timeout_s, least_s):
    monkeypatch.setattr(ray_cluster, "ANSWERS_WITHIN_S", answers_within_s)
    has_answered, took_s = drained(remote_controller(takes_s, is_silent=is_silent), timeout_s)
    assert has_answered is not is_silent
    assert least_s <= took_s < SOON_S


@pytest.mark.usefixtures("cluster")
def test_a_dead_controller_is_given_up() -> None:
    controller = remote_controller(0)
    ray.get(controller.__ray_ready__.remote())
    ray.kill(controller)
    started = time.monotonic()
    assert not ray_cluster.drain(Client(controller), LONG_S)
    assert time.monotonic() - started < SOON_S
