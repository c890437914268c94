"""What ``tandem serve`` leans on of Ray: looked up feature by feature, and used where it fits.

The variables that Ray reads, and its files that are read as text.
"""

import importlib
import importlib.util
import inspect
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import services
from ray._private.node import Node

from app.environment import PROTECTING, node_environment, serve_environment
from app.errors import ConfigError
from app.launch import ray_features
from app.launch.serve import run_service
from app.launch.serve_options import ServeOptions
from app.serve import ray_compatibility
from app.serve.ray_compatibility import REFLECTION, SURGE, Feature, RayName
from tests.support.command_line import tandem

NAMES = [
    pytest.param(feature, name, id=name.name)
    for feature in ray_features.LAUNCH_FEATURES
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


@pytest.mark.parametrize(("feature", "name"), NAMES)
def test_a_name_that_is_gone_is_warned_of_or_refused(monkeypatch, feature, name):
    assert of_launch(ray_features.check_installed_ray()) == []
    gone = take_away(monkeypatch, name)
    if feature.is_required:
        with pytest.raises(ConfigError, match=f"{gone} ") as caught:
            ray_features.check_installed_ray()
        assert "\n" not in caught.value.message
    else:
        (warning,) = of_launch(ray_features.check_installed_ray())
        assert gone in warning
        assert f"Left out: {feature.name}" in warning


@pytest.mark.parametrize("name", ray_features.CONTROLLER.names, ids=lambda name: name.name)
def test_who_joins_a_cluster_needs_to_know_what_it_serves(monkeypatch, name):
    """To deploy deletes the applications that are not named."""
    with pytest.raises(ConfigError, match=take_away(monkeypatch, name)):
        ray_features.check_installed_ray(is_joining=True)


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
    names = ("start_api_server", "start_monitor", "start_log_monitor")
    return {"start_raylet": services.start_raylet} | {name: getattr(Node, name) for name in names}


BEFORE = current()
BY_FEATURE = {
    ray_features.FORKS: {"start_raylet"},
    ray_features.ONE_MACHINE: {"start_api_server", "start_monitor"},
    ray_features.LOG_MONITOR: {"start_log_monitor"},
}


@pytest.mark.parametrize("without", [None, *BY_FEATURE], ids=lambda f: f.name if f else "all")
def test_everything_is_replaced_while_ray_starts_but_sigterm_stays_ours(monkeypatch, without):
    starting = Starting()
    monkeypatch.setattr(ray, "init", starting)
    if without is not None:
        monkeypatch.setattr(Feature, "fits", lambda self: self is not without)
    before = signal.getsignal(signal.SIGTERM)
    with ray_features.only_what_one_machine_needs(CLIENT):
        ray_features.init_ray()
    replaced_names = (names for of, names in BY_FEATURE.items() if of is not without)
    assert starting.changed == set().union(*replaced_names)
    assert starting.sigterm is before
    assert signal.getsignal(signal.SIGTERM) is before
    assert current() == BEFORE


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
    with ray_features.only_what_one_machine_needs(CLIENT):
        services.start_raylet(**dict.fromkeys(needed))  # type: ignore[arg-type]
    assert started == {"worker": str(CLIENT), "client": str(CLIENT)}


@pytest.mark.parametrize("address", [None, "auto"])
def test_serving_with_an_older_ray_is_refused_at_once(monkeypatch, tmp_path, address):
    """A node's environment is not printed either."""
    monkeypatch.setattr(ray_compatibility, "version", lambda _: "2.58.0")
    says = r"Ray 2\.58\.0 is installed.*==2\.60"
    with pytest.raises(ConfigError, match=says):
        run_service(ServeOptions(address=address, log_format="text"))
    done = tandem("environment", "--folder", tmp_path / "new")
    assert isinstance(done.exception, ConfigError)
    assert done.stdout == ""
    assert not (tmp_path / "new").exists()


def test_an_attribute_is_replaced_for_a_while() -> None:
    owner = SimpleNamespace(size=1)
    with ray_features.replaced(owner, "size", 2):
        assert owner.size == 2
    assert owner.size == 1
    with pytest.raises(KeyError), ray_features.replaced(owner, "size", 2):
        raise KeyError
    assert owner.size == 1
    with pytest.raises(AttributeError, match="weight"), ray_features.replaced(owner, "weight", 2):
        pass
    assert not hasattr(owner, "weight")


# The files in which Ray reads its environment; a binary contains the names that it reads.
OTHERS = ("_common/usage/usage_constants.py", "dashboard/modules/reporter/reporter_consts.py")
GCS = "core/src/ray/gcs/gcs_server"


def test_ray_reads_every_variable_that_is_set(tmp_path: Path) -> None:
    """It ignores unknown variables without a message."""
    values = node_environment(tmp_path) | serve_environment(tmp_path, (1, 2))
    names = {name for name in values if name.startswith("RAY_")}
    files = (*ray_features.VARIABLES, *OTHERS)
    installed = Path(ray.__file__).parent
    source = "".join((installed / file).read_text() for file in files)
    binary = (installed / GCS).read_bytes()
    lost = {name for name in names if f'"{name}"' not in source}
    assert {name for name in lost if f"{name}\0".encode() not in binary} == set()


def renamed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have Ray's files read another variable."""
    read = ray_features._source
    others = lambda file: (read(file) or "").replace(name, "RAY_OTHER")  # noqa: E731
    monkeypatch.setattr(ray_features, "_source", others)


@pytest.mark.parametrize("name", PROTECTING)
def test_a_variable_that_protects_is_demanded(monkeypatch, tmp_path, name):
    others = ["RAY_X", "RAY_SERVE_HAPROXY_BIN"]  # which are not looked for
    ray_features.check_protecting([*others, *PROTECTING])
    renamed(monkeypatch, name)
    environment = serve_environment(tmp_path, (1, 2)) | dict.fromkeys(PROTECTING, "1")
    with pytest.raises(ConfigError, match=f"it does not read {name}; pip install"):
        ray_features.check_protecting(environment)


def test_files_that_are_gone_are_as_variables_that_are_not_read(monkeypatch, tmp_path) -> None:
    assert "HAPROXY_CONFIG_TEMPLATE" in ray_features.haproxy_template()
    spec = SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(ConfigError, match=PROTECTING[0]):
        ray_features.check_protecting(PROTECTING)
    ray_features.check_protecting(["RAY_event_stats"])
    with pytest.raises(ConfigError, match=r"no file serve/_private/haproxy_templates\.py"):
        ray_features.haproxy_template()


def test_a_node_gets_no_environment_that_does_not_protect(monkeypatch, tmp_path):
    renamed(monkeypatch, "RAY_SERVE_HAPROXY_MAXCONN")
    done = tandem("environment", "--folder", tmp_path / "new")
    assert "does not read RAY_SERVE_HAPROXY_MAXCONN" in str(done.exception)
    assert done.stdout == ""


def test_a_node_with_a_newer_ray_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_compatibility, "TESTED_RAY", ("2.1", "2.2"))
    done = tandem("environment", "--folder", tmp_path / "new")
    assert done.exit_code == 0
    assert "is newer than the versions that Tandem was tested with (2.1, 2.2)" in done.stderr
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1" in done.stdout
