"""The private features of Ray that ``tandem serve`` depends on, each with a check of its presence.

A public option, variable or function of Ray is used where there is one (decision 0052). No other
module of this package uses private names, except for the methods of Serve's client that
:func:`serve_client` returns. Each name is used only if its feature fits.

Some files of the installed Ray are read as text, before anything imports ray. They show whether Ray
reads the variables that protect the service, and contain Serve's HAProxy template. Functions import
ray inside their bodies, since it reads its environment at import (:mod:`app.launch.run_folder`).
"""

import contextlib
import importlib.util
import inspect
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.environment import PROTECTING
from app.serve.ray_compatibility import (
    REPLICA_FEATURES,
    Feature,
    RayName,
    check_ray,
    check_ray_version,
    mismatch,
)

NODE, SERVICES, CLIENT = "ray._private.node", "ray._private.services", "ray.serve._private.client"
DEPLOY = Feature(
    "deploying a configuration",
    "nothing would be served",
    (
        RayName("ray.serve.context", "_get_global_client", ("raise_if_no_controller_running",)),
        RayName(CLIENT, "ServeControllerClient.deploy_apps", ("config",)),
    ),
    is_required=True,
)
# The controller's state, read with a time limit, and the draining of its replicas.
CONTROLLER = Feature(
    "asking Serve's controller",
    "at the end of tandem serve the requests that are under way are cut off",
    (
        RayName(CLIENT, "ServeControllerClient", attributes=("_controller",)),
        RayName(CLIENT, "ServeControllerClient.delete_apps", ("names", "blocking")),
        RayName(CLIENT, "ServeControllerClient.shutdown", ("timeout_s",)),
        RayName("ray.serve._private.controller", "ServeController.get_serve_instance_details"),
    ),
)
LOG_MONITOR = Feature(
    "no log monitor", "it uses 0.01 of a core", (RayName(NODE, "Node.start_log_monitor"),)
)
DEATHS = Feature(
    "deaths of Ray's processes in a line",
    "each prints some 900 characters",
    (RayName("ray._private.worker", "print_to_stdstream", ("data",)),),
)
# A Ray on one machine needs neither the dashboard nor the autoscaler of nodes.
ONE_MACHINE = Feature(
    "no dashboard and no autoscaler of nodes",
    "Ray starts both, and starts later",
    (
        RayName(NODE, "Node.start_monitor"),
        RayName(NODE, "Node.start_api_server", ("include_dashboard",)),
        RayName(NODE, "Node", attributes=("_webui_url",)),
        RayName(NODE, "Node.get_gcs_client"),
        RayName("ray._private.ray_constants", "DASHBOARD_ADDRESS"),
        RayName("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
    ),
)
FORKS = Feature(
    "the fork server",
    "each process of Ray imports everything itself, and the start takes some seconds longer",
    (
        RayName(SERVICES, "start_raylet", ("worker_path",)),
        RayName(SERVICES, "_build_python_executable_command_memory_profileable"),
        RayName("ray._private.workers.default_worker", "parser"),
    ),
)
# launch/fork_client.py
EXPORTER = Feature(
    "metrics that only this user's processes reach",
    "every user of this machine can read Ray's port of metrics and block it; no name of a key is "
    "in them",
    (RayName("ray._private.prometheus_exporter", "make_server"),),
)
LAUNCH_FEATURES = (DEPLOY, CONTROLLER, LOG_MONITOR, DEATHS, ONE_MACHINE, FORKS, EXPORTER)
# The files in which Ray reads the variables that protect.
VARIABLES = ("serve/_private/constants.py", "_private/ray_constants.py")
HAPROXY_TEMPLATE = "serve/_private/haproxy_templates.py"
NOBODY = b"127.0.0.1:9"  # an address where nothing listens: the port of the discard protocol


def check_installed_ray(*, is_joining: bool = False) -> list[str]:
    """Look up every private name that the service uses; return warnings, as check_ray does.

    Raises:
        ConfigError: as check_ray. With ``is_joining`` also if the controller's state cannot be
            read: deploying deletes applications that are not listed, so the others must be known.
    """
    others = [feature for feature in LAUNCH_FEATURES if feature is not CONTROLLER]
    asking = replace(CONTROLLER, is_required=is_joining)
    return check_ray((*REPLICA_FEATURES, *others, asking))


def check_protecting(names: Collection[str]) -> None:
    """Check that Ray reads those of the variables that protect the service.

    Ray ignores unknown variables without a message.

    Raises:
        ConfigError: it does not read one of them, or is too old.
    """
    check_ray_version()
    read = "".join(_source(file) or "" for file in VARIABLES)
    if lost := [name for name in PROTECTING if name in names and f'"{name}"' not in read]:
        raise mismatch(f"it does not read {', '.join(lost)}")


def haproxy_template() -> str:
    """Return the source of the module with Serve's template of HAProxy's configuration."""
    check_ray_version()
    if (source := _source(HAPROXY_TEMPLATE)) is None:
        raise mismatch(f"it has no file {HAPROXY_TEMPLATE}")
    return source


def _source(file: str) -> str | None:
    """Return a file's text; None if the installed Ray lacks the file."""
    package = importlib.util.find_spec("ray")  # finds the package without importing it
    assert package is not None  # Ray's version was checked before
    assert package.origin is not None
    with contextlib.suppress(OSError):
        return (Path(package.origin).parent / file).read_text("utf-8")
    return None


def metrics_are_on_socket(forks: object | None) -> bool:
    """Whether Ray's agent shows its metrics on a socket of the run's folder, not on a port."""
    return forks is not None and FORKS.fits() and EXPORTER.fits()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute during the block; raise AttributeError if it does not exist."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def init_ray(**options: Any) -> None:
    """Call ``ray.init`` without two side effects for which it has no option.

    It would replace the handler of SIGTERM, so that ``stop_signals`` would miss the signal. And its
    log monitor would use 0.01 of a core to send the replicas' output, which is not shown.
    """
    import ray

    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_sigterm())
        if LOG_MONITOR.fits():
            import ray._private.node

            stack.enter_context(
                replaced(ray._private.node.Node, "start_log_monitor", lambda _: None)
            )
        ray.init(**options)


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM: ignore changes from Python, and undo those from C at the end."""
    set_handler, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def set_others(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM:
            return signal.getsignal(number)
        return set_handler(number, handler)

    try:
        with replaced(signal, "signal", set_others):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def errors_passed_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass Ray's messages on dead processes to ``tell``, which a thread of Ray's calls."""
    if not DEATHS.fits():
        yield
        return
    from ray._private import worker

    def print_error(data: Mapping[str, Any], *_: object, **__: object) -> None:
        for line in data["lines"]:
            tell(line)

    with replaced(worker, "print_to_stdstream", print_error):
        yield


@contextlib.contextmanager
def only_what_one_machine_needs(client: Path | None) -> Iterator[None]:
    """Let ``ray.init`` start no dashboard, and start Python processes through ``client``.

    Changes that do not fit the installed Ray are left out.

    Args:
        client: a script that gets Ray's command as arguments (:mod:`app.launch.fork_client`);
            None: Ray starts its processes itself.
    """
    with contextlib.ExitStack() as stack:
        if client is not None and FORKS.fits():
            stack.enter_context(_started_by(client))
        if ONE_MACHINE.fits():
            stack.enter_context(_without_dashboard())
        yield


@contextlib.contextmanager
def _started_by(client: Path) -> Iterator[None]:
    """Let the raylet start Python processes through ``client``."""
    from ray._private import services

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

    with replaced(services, "start_raylet", start_raylet):
        yield


@contextlib.contextmanager
def _without_dashboard() -> Iterator[None]:
    """Let ``ray.init`` start neither the dashboard nor the autoscaler of nodes.

    With ``include_dashboard=False`` Ray still starts the process, for usage statistics, and waits
    for it.
    """
    from ray._private import ray_constants
    from ray._private.node import Node

    def no_dashboard(node: Any, **_: Any) -> None:
        node._webui_url = ""  # as without a dashboard
        # Otherwise the agent asks every second where to report errors of nodes.
        key, namespace = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
        node.get_gcs_client().internal_kv_put(key.encode(), NOBODY, True, namespace)

    with (
        replaced(Node, "start_api_server", no_dashboard),
        replaced(Node, "start_monitor", lambda _: None),
    ):
        yield


def serve_client() -> Any:
    """Return Serve's own client of its controller on the connected Ray; None if no Serve runs."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def serve_details(client: Any, timeout_s: float) -> dict[str, Any]:
    """Return the controller's state, in the form of Serve's ``ServeInstanceDetails``.

    Raises:
        RayError: the controller is dead, or did not answer in time.
    """
    import ray

    asked = client._controller.get_serve_instance_details.remote()
    details: dict[str, Any] = ray.get(asked, timeout=timeout_s)
    return details
