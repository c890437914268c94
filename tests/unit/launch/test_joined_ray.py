"""A cluster that somebody else started is joined and left; what is served there is shared_serve's.

tests/integration/test_shared_serve.py deploys beside the applications of others and takes ours
back.
"""

import pytest
import ray

from app.errors import ConfigError
from app.launch.ray_cluster import joined_ray

ADDRESS = "127.0.0.1:6379"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cluster is asked to do, in its place."""
    told: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: told.append(f"join {address}"))
    monkeypatch.setattr(ray, "shutdown", lambda: told.append("leave"))
    return told


def test_it_is_joined_and_left(calls: list[str]) -> None:
    with joined_ray(ADDRESS):
        assert calls == [f"join {ADDRESS}"]
    assert calls[1:] == ["leave"]


def test_an_error_meanwhile_leaves_it_too(calls: list[str]) -> None:
    with pytest.raises(KeyError), joined_ray(ADDRESS):
        raise KeyError
    assert calls[1:] == ["leave"]


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=rf"no Ray cluster at {ADDRESS}: refused; .*ray start"),
        joined_ray(ADDRESS),
    ):
        pass
