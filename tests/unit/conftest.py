"""Unit tests start no cluster, and leave the environment as it was: Ray's workers inherit it."""

import os
from collections.abc import Iterator
from typing import NoReturn
from unittest.mock import patch

import pytest
import ray
from instruments import Instruments

from app.metrics.meter import Meter, meter


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a unit test called ray.init; such a test belongs to integration/")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield


@pytest.fixture
def told() -> Iterator[Instruments]:
    """Switch the process's meter on; this is what it tells Ray."""
    instruments = Instruments()
    meter.start(instruments.make)
    yield instruments
    meter.__dict__.update(Meter().__dict__)
