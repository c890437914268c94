"""A cluster that somebody else started is joined and left; what is served there is shared_serve's.

tests/integration/test_shared_serve.py deploys beside the applications of others and takes ours
back.
"""

import socket
from collections.abc import Iterator

import pytest
import ray

from app.errors import ConfigError
from app.launch.ray_cluster import joined_ray


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens, as a cluster's head does."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        yield f"127.0.0.1:{head.getsockname()[1]}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cluster is asked to do, in its place."""
    told: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: told.append(f"join {address}"))
    monkeypatch.setattr(ray, "shutdown", lambda: told.append("leave"))
    return told


def test_it_is_joined_and_left(calls: list[str], address: str) -> None:
    with joined_ray(address):
        assert calls == [f"join {address}"]
    assert calls[1:] == ["leave"]


def test_an_error_meanwhile_leaves_it_too(calls: list[str], address: str) -> None:
    with pytest.raises(KeyError), joined_ray(address):
        raise KeyError
    assert calls[1:] == ["leave"]


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=rf"no Ray cluster at {address}: refused; .*ray start"),
        joined_ray(address),
    ):
        pass


def test_a_process_for_the_client_that_died_at_its_start_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    asked = []
    failure = "Initialization failure from server:\nTraceback\nRuntimeError: it has ended"

    def init(**_: object) -> None:
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionError(failure)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with joined_ray(address):
        assert len(asked) == 3
    monkeypatch.setattr(ray, "init", lambda **_: init_always_fails(failure))
    with (
        pytest.raises(ConfigError, match=r"no Ray cluster at \S+: RuntimeError: it has ended; st"),
        joined_ray(address),
    ):
        pass


def init_always_fails(message: str) -> None:
    raise ConnectionError(message)


def test_another_ray_there(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=rf"cannot join .* at {address}: Version mismatch"),
        joined_ray(address),
    ):
        pass
