"""The private names of Ray that ``tandem serve`` uses: no other module of this package touches one.

Each is used only where its feature fits (:mod:`app.launch.ray_features`). ray is imported only
inside functions: it reads its environment at that moment (:mod:`app.launch.isolated_environment`).
"""

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from app.launch.ray_features import ERRORS, FORKS, LOG_MONITOR, ONE_MACHINE, SIGNALS

NOBODY = b"127.0.0.1:9"  # the port of the discard protocol


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

    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_sigterm())
        if SIGNALS.fits():
            import ray._private.utils

            stack.enter_context(replaced(ray._private.utils, "set_sigterm_handler", lambda _: None))
        if LOG_MONITOR.fits():
            import ray._private.node

            stack.enter_context(
                replaced(ray._private.node.Node, "start_log_monitor", lambda _: None)
            )
        ray.init(**options)


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Let SIGTERM have the handler after that it had before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def errors_told_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Hand on what Ray would print of its processes' deaths; on a thread of Ray's."""
    if not ERRORS.fits():
        yield
        return
    from ray._private import worker

    def told(data: Mapping[str, Any], *_: object, **__: object) -> None:
        for line in data["lines"]:
            tell(line)

    with replaced(worker, "print_to_stdstream", told):
        yield


@contextlib.contextmanager
def only_what_one_machine_needs(client: Path | None) -> Iterator[None]:
    """Let ``ray.init`` start no dashboard, and Python processes by way of ``client``.

    What the installed Ray has no place for is left out.

    Args:
        client: a script that is given what Ray would have run (:mod:`app.launch.forks.client`);
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
    """Let the raylet start Python processes by way of ``client``."""
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

    Without a dashboard (``include_dashboard=False``) Ray starts its process all the same, for usage
    statistics, and waits for it.
    """
    from ray._private import ray_constants
    from ray._private.node import Node

    def no_dashboard(node: Any, **_: Any) -> None:
        node._webui_url = ""  # as it is without one
        # The agent asks every second until it knows where to report errors of nodes.
        key, namespace = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
        node.get_gcs_client().internal_kv_put(key.encode(), NOBODY, True, namespace)

    with (
        replaced(Node, "start_api_server", no_dashboard),
        replaced(Node, "start_monitor", lambda _: None),
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
