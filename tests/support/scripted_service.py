"""A service in place of the network, for tandem_client: its answers are scripted, nothing waits."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tandem_client import Client
from tests.support.hand_clock import HandClock
from tests.support.http_server import classified

Step = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


class ScriptedService:
    """Answers one request after another with its steps, then as a service does that is well."""

    def __init__(self, *steps: Step) -> None:
        self._steps: Iterator[Step] = iter(steps)
        self.requests: list[httpx.Request] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = next(self._steps, None)
        if step is None:
            return answered()
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, httpx.Response) else step(request)


class SleepingClock(HandClock):
    """A clock that sleep moves; ``slept`` is how long each was."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


def answered(label: str = "tench", **more: Any) -> httpx.Response:
    return httpx.Response(200, json=classified(label) | more)


def refused(status=429, code="overloaded", message="full", **headers):
    """Return an error as the service tells it; underscores in names stand for hyphens."""
    error = {"code": code, "message": message, "request_id": "r9"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, content=json.dumps({"error": error}), headers=named)


# Makes a client, the service that it calls, and its clock.
Make = Callable[..., tuple[Client, ScriptedService, SleepingClock]]
