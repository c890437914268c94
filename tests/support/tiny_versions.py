"""Versions of one tiny set in one folder, and the deployment Traffic in this process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from ray.exceptions import RayActorError

from models.model_set import load_model_set
from models.stores import VERSIONS_NAME
from tests.support.tiny_networks import COLORS, write_tiny_set

GOOD, SURER, WRONG = {"sure": 8.0}, {"sure": 9.0}, {"sure": -8.0}  # the last one's labels are wrong


def write_versions(folder: Path, *gains: Mapping[str, float]) -> list[str]:
    """Write a version for each of the gains; return FOLDER@FINGERPRINT of each in order."""
    first, *others = gains
    write_tiny_set(folder, gains=first)
    names = [f"{folder}@{load_model_set(str(folder)).fingerprint()}"]
    return names + [add_version(folder, gains=other) for other in others]


def add_version(folder: Path, **made: Any) -> str:
    """Keep another version in the set's folder, as :func:`write_tiny_set` makes it; name it."""
    place = write_tiny_set(folder / VERSIONS_NAME / "new", **made)
    version = load_model_set(str(place)).fingerprint()
    place.rename(place.with_name(version))
    return f"{folder}@{version}"


def name_of(path: str) -> str:
    """Return what the service calls a version of :func:`write_versions`."""
    return f"tiny@{path.rpartition('@')[2]}"


def pictures(number: int) -> list[tuple[str, bytes]]:
    """Return so many pictures, each with its colour; no two are alike."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(number):
        color = list(COLORS)[index % len(COLORS)]
        noise = rng.integers(0, 60, (24, 24, 3), np.uint8)
        image = cv2.add(np.full((24, 24, 3), COLORS[color], np.uint8), noise)
        made.append((color, cv2.imencode(".png", image)[1].tobytes()))
    return made


class LocalHandle:
    """A handle of a deployment that is an object of this process."""

    def __init__(self, deployment: Any) -> None:
        self.deployment: Any = deployment  # None: it is away

    def __getattr__(self, name: str) -> "LocalMethod":
        if self.deployment is None:
            raise RayActorError
        return LocalMethod(lambda: getattr(self.deployment, name))


class LocalMethod:
    def __init__(self, method: Callable[[], Any]) -> None:
        self._method = method

    async def remote(self, *args: Any) -> Any:
        return await self._method()(*args)
