"""A cluster that somebody else started: what is put there is taken back, and nothing else."""

from collections.abc import Callable

import pytest
import ray
from ray import serve

from app.errors import ConfigError
from app.launch.ray_cluster import joined_ray

ADDRESS = "127.0.0.1:6379"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cluster is asked to do, in its place; it serves nothing."""
    told: list[str] = []

    def telling(name: str) -> Callable[..., None]:
        return lambda *arguments, **_: told.append(" ".join([name, *map(str, arguments)]))

    monkeypatch.setattr(ray, "init", lambda address, **_: told.append(f"join {address}"))
    monkeypatch.setattr(ray, "shutdown", telling("leave"))
    monkeypatch.setattr(serve, "shutdown", telling("stop serving"))
    monkeypatch.setattr(serve, "delete", telling("delete"))

    def no_controller(*_: object, **__: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", no_controller)
    return told


def test_one_that_served_nothing_serves_nothing_again(calls: list[str]) -> None:
    with joined_ray(ADDRESS, ["tandem"]):
        assert calls == [f"join {ADDRESS}"]
    assert calls[1:] == ["stop serving", "leave"]


def test_what_was_served_already_stays(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: "Serve's controller")
    with joined_ray(ADDRESS, ["tandem", "other"]):
        pass
    assert calls[1:] == ["delete tandem", "delete other", "leave"]


def test_an_error_meanwhile_takes_it_back_too(calls: list[str]) -> None:
    with pytest.raises(KeyError), joined_ray(ADDRESS, ["tandem"]):
        raise KeyError
    assert calls[1:] == ["stop serving", "leave"]


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=rf"no Ray cluster at {ADDRESS}: refused; .*ray start"),
        joined_ray(ADDRESS, []),
    ):
        pass
