"""What ``tandem serve`` leans on of Ray: looked up feature by feature, and used where it fits."""

import importlib
import inspect
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import services
from ray._private.node import Node

from app.calls import ray_compatibility
from app.calls.ray_features import REFLECTION, SURGE
from app.calls.ray_names import Feature, RayName
from app.errors import ConfigError
from app.launch.ray_features import (
    CONTROLLER,
    FORKS,
    LAUNCH_FEATURES,
    LOG_MONITOR,
    ONE_MACHINE,
    check_installed_ray,
)
from app.launch.ray_internals import init_ray, only_what_one_machine_needs, replaced
from app.launch.resolved_config import ServeOptions
from app.launch.serve import run_service
from tests.support.command_line import tandem

NAMES = [
    pytest.param(feature, name, id=name.name)
    for feature in LAUNCH_FEATURES
    for name in feature.names
]
CLIENT = Path("client.py")


def take_away(monkeypatch: pytest.MonkeyPatch, name: RayName) -> str:
    """Take a name, or what a class's ``__init__`` sets; return how it is said."""
    owner_name, _, attribute = name.name.rpartition(".")
    owner = importlib.import_module(name.module)
    owner = getattr(owner, owner_name) if owner_name else owner
    if name.attributes:
        monkeypatch.setattr(getattr(owner, attribute), "__init__", lambda _: None)
        return f"{name.module}.{name.name} has no {', '.join(name.attributes)}"
    monkeypatch.delattr(owner, attribute)
    return f"{name.module}.{name.name} is not there"


def of_launch(warnings: list[str]) -> list[str]:
    """Leave out what Ray 2.59 lacks of the replicas' features."""
    of_replicas = (REFLECTION.name, SURGE.name)
    return [w for w in warnings if not any(name in w for name in of_replicas)]


def test_the_installed_ray_has_every_name() -> None:
    assert of_launch(check_installed_ray()) == []


@pytest.mark.parametrize(("feature", "name"), NAMES)
def test_a_name_that_is_gone_is_warned_of_or_refused(
    monkeypatch: pytest.MonkeyPatch, feature: Feature, name: RayName
) -> None:
    gone = take_away(monkeypatch, name)
    if feature.is_required:
        with pytest.raises(ConfigError, match=f"{gone} ") as caught:
            check_installed_ray()
        assert "\n" not in caught.value.message
    else:
        (warning,) = of_launch(check_installed_ray())
        assert gone in warning
        assert f"Left out: {feature.name}" in warning


@pytest.mark.parametrize("name", CONTROLLER.names, ids=lambda name: name.name)
def test_who_joins_a_cluster_needs_to_know_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, name: RayName
) -> None:
    """To deploy deletes the applications that are not named."""
    gone = take_away(monkeypatch, name)
    with pytest.raises(ConfigError, match=gone):
        check_installed_ray(is_joining=True)


class Starting:
    """Stands for ``ray.init``: notes what is replaced meanwhile, and takes SIGTERM as Ray does."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.sigterm: object = None

    def __call__(self, **options: object) -> None:
        now = current()
        self.changed = {name for name, value in now.items() if value is not BEFORE[name]}
        ray._private.utils.set_sigterm_handler(lambda *_: None)
        self.sigterm = signal.getsignal(signal.SIGTERM)


def current() -> dict[str, object]:
    return {
        "start_raylet": services.start_raylet,
        "start_api_server": Node.start_api_server,
        "start_monitor": Node.start_monitor,
        "start_log_monitor": Node.start_log_monitor,
    }


BEFORE = current()
BY_FEATURE = {
    FORKS: {"start_raylet"},
    ONE_MACHINE: {"start_api_server", "start_monitor"},
    LOG_MONITOR: {"start_log_monitor"},
}


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    made = Starting()
    monkeypatch.setattr(ray, "init", made)
    before = signal.getsignal(signal.SIGTERM)
    yield made
    assert signal.getsignal(signal.SIGTERM) is before
    assert current() == BEFORE


def start(starting: Starting) -> set[str]:
    with only_what_one_machine_needs(CLIENT):
        init_ray()
    return starting.changed


def test_sigterm_stays_ours_while_ray_starts(starting: Starting) -> None:
    before = signal.getsignal(signal.SIGTERM)
    start(starting)
    assert starting.sigterm is before


def test_everything_is_replaced_while_ray_starts(starting: Starting) -> None:
    assert start(starting) == set().union(*BY_FEATURE.values())


@pytest.mark.parametrize("feature", BY_FEATURE, ids=lambda feature: feature.name)
def test_without_a_feature_the_others_are_as_they_were(
    starting: Starting, monkeypatch: pytest.MonkeyPatch, feature: Feature
) -> None:
    monkeypatch.setattr(Feature, "fits", lambda self: self is not feature)
    others = set().union(*(names for of, names in BY_FEATURE.items() if of is not feature))
    assert start(starting) == others


def test_the_raylet_starts_python_by_way_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature(services.start_raylet)
    started: dict[str, object] = {}

    def start_raylet(*arguments: object) -> None:
        worker = signature.bind(*arguments).arguments["worker_path"]
        command = services._build_python_executable_command_memory_profileable("c", "/tmp")
        started.update(worker=worker, client=command[-1])

    start_raylet.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(services, "start_raylet", start_raylet)
    needed = [name for name, p in signature.parameters.items() if p.default is p.empty]
    with only_what_one_machine_needs(CLIENT):
        services.start_raylet(**dict.fromkeys(needed))  # type: ignore[arg-type]
    assert started == {"worker": str(CLIENT), "client": str(CLIENT)}


@pytest.mark.parametrize("address", [None, "auto"])
def test_serving_with_an_older_ray_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.58.0")
    with pytest.raises(ConfigError, match=r"Ray 2\.58\.0 is installed.*==2\.60"):
        run_service(ServeOptions(address=address, log_format="text"))


def test_a_nodes_environment_is_not_printed_for_an_older_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.58.0")
    done = tandem("environment", "--folder", tmp_path / "new")
    assert isinstance(done.exception, ConfigError)
    assert done.stdout == ""
    assert not (tmp_path / "new").exists()


def test_an_attribute_is_replaced_for_a_while() -> None:
    owner = SimpleNamespace(size=1)
    with replaced(owner, "size", 2):
        assert owner.size == 2
    assert owner.size == 1
    with pytest.raises(KeyError), replaced(owner, "size", 2):
        raise KeyError
    assert owner.size == 1
    with pytest.raises(AttributeError, match="weight"), replaced(owner, "weight", 2):
        pass
    assert not hasattr(owner, "weight")
