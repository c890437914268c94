"""The private names of Ray that ``tandem serve`` uses: no other module of this package touches one.

What Ray has a public option, variable or function for is used through that instead (the decision
record says which was looked for). ray is imported only inside functions: it reads its environment
at that moment (:mod:`app.launch.isolated_environment`).
"""

import contextlib
import importlib.util
import inspect
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from app.calls.ray_compatibility import check_ray, check_ray_version, mismatch
from app.calls.ray_names import REPLICA_NAMES, RayName

LAUNCH_NAMES = (
    RayName("ray._private.utils", "set_sigterm_handler", ("sigterm_handler",)),
    RayName("ray._private.node", "Node.start_log_monitor"),
    RayName("ray._private.node", "Node.start_monitor"),
    RayName("ray._private.node", "Node.get_gcs_client"),
    RayName("ray._private.ray_constants", "DASHBOARD_ADDRESS"),
    RayName("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
    RayName("ray._private.node", "Node.start_api_server", ("include_dashboard",)),
    RayName("ray._private.node", "Node", attributes=("_webui_url",)),
    RayName("ray._private.services", "start_raylet", ("worker_path",)),
    RayName("ray._private.services", "_build_python_executable_command_memory_profileable"),
    RayName("ray._private.workers.default_worker", "parser"),
    RayName("ray.serve.context", "_get_global_client", ("raise_if_no_controller_running",)),
    RayName("ray.serve._private.client", "ServeControllerClient", attributes=("_controller",)),
    RayName("ray.serve._private.client", "ServeControllerClient.deploy_apps", ("config",)),
    RayName(
        "ray.serve._private.client", "ServeControllerClient.delete_apps", ("names", "blocking")
    ),
    RayName("ray.serve._private.client", "ServeControllerClient.shutdown", ("timeout_s",)),
    RayName("ray.serve._private.controller", "ServeController.get_serve_instance_details"),
)
NOBODY = b"127.0.0.1:9"  # the port of the discard protocol
# Where Ray reads its environment.
VARIABLES = (
    "serve/_private/constants.py",
    "_private/ray_constants.py",
    "_common/usage/usage_constants.py",
    "dashboard/modules/reporter/reporter_consts.py",
)
GCS = "core/src/ray/gcs/gcs_server"


def check_installed_ray() -> None:
    """Check every private name that the service uses; raise :class:`ConfigError` as check_ray."""
    check_ray((*REPLICA_NAMES, *LAUNCH_NAMES))


def check_variables(names: Iterable[str]) -> None:
    """Check that Ray reads these variables: one that it does not know it ignores in silence.

    Raises:
        ConfigError: it names the ones that are not in Ray's sources.

    """
    check_ray_version()
    known = "".join(_source(file) for file in VARIABLES)
    lost = sorted(name for name in names if f'"{name}"' not in known)
    if lost := [name for name in lost if not _is_in_gcs(name)]:
        raise mismatch(f"it does not read {', '.join(lost)}")


def haproxy_template() -> str:
    """Return the source of the module with Serve's template of HAProxy's configuration."""
    check_ray_version()
    return _source("serve/_private/haproxy_templates.py")


def _is_in_gcs(name: str) -> bool:
    """Whether the GCS, which is no Python, knows a variable: its name is in the program's text."""
    try:
        with _installed(GCS).open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise mismatch(f"it has no file {GCS}") from error
    with text:
        return text.find(name.encode("ascii") + b"\0") >= 0


def _source(file: str) -> str:
    try:
        return _installed(file).read_text("utf-8")
    except OSError as error:
        raise mismatch(f"it has no file {file}") from error


def _installed(file: str) -> Path:
    package = importlib.util.find_spec("ray")  # finds it without importing it
    assert package is not None  # its version is known
    assert package.origin is not None
    return Path(package.origin).parent / file


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for a while; AttributeError if there is none of that name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def init_ray(**options: Any) -> None:
    """Call ``ray.init`` without two things that it does unasked and has no option for.

    It would take SIGTERM, and a StopRequest would hear of it no more. And its log monitor would use
    0.01 of a core to send us what replicas print, which we do not ask for.
    """
    import ray
    import ray._private.node
    import ray._private.utils

    with (
        replaced(ray._private.utils, "set_sigterm_handler", lambda _: None),
        replaced(ray._private.node.Node, "start_log_monitor", lambda _: None),
    ):
        ray.init(**options)


@contextlib.contextmanager
def only_what_one_machine_needs(client: Path) -> Iterator[None]:
    """Let ``ray.init`` start no dashboard, and Python processes by way of ``client``.

    Without a dashboard (``include_dashboard=False``) Ray starts its process all the same, for usage
    statistics, and waits for it. Nor does it start the autoscaler of nodes. ``client`` is
    a script that is given what Ray would have run
    (:mod:`app.launch.forks.client`).
    """
    import ray._private.node
    from ray._private import ray_constants, services

    python = services._build_python_executable_command_memory_profileable
    raylet = services.start_raylet
    signature = inspect.signature(raylet)

    def by_client(*arguments: Any, **options: Any) -> list[str]:
        return [*python(*arguments, **options), str(client)]

    def start_raylet(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.arguments["worker_path"] = str(client)
        with replaced(services, python.__name__, by_client):
            return raylet(*bound.args, **bound.kwargs)

    def no_dashboard(node: Any, **_: Any) -> None:
        node._webui_url = ""  # as it is without one
        # The agent asks every second until it knows where to report errors of nodes.
        key, namespace = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
        node.get_gcs_client().internal_kv_put(key.encode(), NOBODY, True, namespace)

    with (
        replaced(services, "start_raylet", start_raylet),
        replaced(ray._private.node.Node, "start_api_server", no_dashboard),
        replaced(ray._private.node.Node, "start_monitor", lambda _: None),
    ):
        yield


class ServeClient:
    """Serve's own client of its controller, as far as it is needed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def running(cls) -> Self | None:
        """Return the client of the Serve that runs on the connected Ray; None if none does."""
        from ray.serve.context import _get_global_client

        client = _get_global_client(raise_if_no_controller_running=False)
        return None if client is None else cls(client)

    def deploy(self, schema: Any) -> None:
        """Apply a ``ServeDeploySchema``; what was applied before and is not in it is deleted."""
        self._client.deploy_apps(schema)

    def delete(self, names: Iterable[str]) -> None:
        """Begin to delete applications; their replicas answer what is under way."""
        self._client.delete_apps(list(names), blocking=False)

    def shut_down(self, timeout_s: float) -> None:
        """End Serve: its controller and proxies too."""
        self._client.shutdown(timeout_s)

    def details(self, timeout_s: float) -> dict[str, Any]:
        """Return what the controller knows, as Serve's ``ServeInstanceDetails`` has it.

        Raises:
            RayError: the controller is dead, or did not answer in time.

        """
        import ray

        asked = self._client._controller.get_serve_instance_details.remote()
        details: dict[str, Any] = ray.get(asked, timeout=timeout_s)
        return details
