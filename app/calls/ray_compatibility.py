"""Checks that the installed Ray is the one that the application was written for.

It uses names that Ray does not promise to keep. They are listed here and in
:mod:`app.launch.ray_internals`, and looked up before anything starts: a name that is gone, or takes
other parameters, would otherwise show as a service that half works.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from app.errors import ConfigError

SUPPORTED_RAY = "2.60"  # the minor version that pyproject.toml pins


@dataclass(frozen=True)
class RayName:
    """A name that is used: where it is, the parameters given to it, the attributes read of it.

    ``attributes`` are those that a class's ``__init__`` sets, which no class shows.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Return what is not as it is used; None if all is."""
        try:
            found = _resolved(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.name} is not there"
        if lacking := set(self.parameters) - _parameters(found):
            return f"{self.module}.{self.name} takes no {', '.join(sorted(lacking))}"
        if lacking := set(self.attributes) - _set_in_init(found):
            return f"{self.module}.{self.name} has no {', '.join(sorted(lacking))}"
        return None


def _resolved(owner: object, dotted: str) -> object:
    for part in dotted.split("."):
        is_field = part in getattr(owner, "__dataclass_fields__", {})
        owner = None if is_field else getattr(owner, part)
    return owner


def _parameters(found: object) -> set[str]:
    return set(inspect.signature(found).parameters) if callable(found) else set()


def _set_in_init(found: object) -> set[str]:
    return {
        name
        for one in getattr(found, "__mro__", ())
        if inspect.isfunction(init := vars(one).get("__init__"))
        for name in init.__code__.co_names
    }


ROUTER = "ray.serve.request_router"
# What replicas lean on: the router of the stages (app/calls/locality_router.py), whose interface
# Serve calls alpha, and the servers that app/deployments/loopback.py and grpc_server.py set up.
REPLICA_NAMES = (
    RayName(ROUTER, "FIFOMixin"),
    RayName(ROUTER, "MultiplexMixin"),
    RayName(ROUTER, "ReplicaID.unique_id"),
    RayName(ROUTER, "LocalityMixin", parameters=("self_node_id",)),
    RayName(ROUTER, "RequestRouter", ("deployment_id",)),
    RayName(ROUTER, "RequestRouter.choose_replicas", ("candidate_replicas", "pending_request")),
    RayName(ROUTER, "RequestRouter.on_send_request", ("replica_id",)),
    RayName(ROUTER, "RequestRouter.on_new_queue_len_info", ("replica_id", "num_ongoing_requests")),
    RayName(ROUTER, "RequestRouter.on_replica_actor_died", ("replica_id",)),
    RayName(ROUTER, "RequestRouter.on_replica_actor_unavailable", ("replica_id",)),
    RayName(ROUTER, "RequestRouter.update_replicas", ("replicas",)),
    RayName(ROUTER, "RequestRouter.replica_queue_len_cache"),
    RayName(ROUTER, "RequestRouter.queue_len_response_deadline_s"),
    RayName(ROUTER, "RunningReplica.get_queue_len", ("deadline_s",)),
    RayName(ROUTER, "RunningReplica.node_id"),
    RayName(ROUTER, "RunningReplica.replica_id"),
    RayName(ROUTER, "PendingRequest.routing_context"),
    RayName(
        "ray.serve.handle",
        "DeploymentHandle.options",
        ("method_name", "request_serialization", "response_serialization"),
    ),
    RayName("ray.util", "get_node_ip_address"),
    RayName("grpc.aio._server", "Server.add_insecure_port", ("address",)),
    RayName("ray.serve._private.grpc_util", "DEFAULT_GRPC_SERVER_OPTIONS"),
    RayName("ray.serve._private.grpc_util", "start_grpc_server"),
)


def check_ray(names: Iterable[RayName] = REPLICA_NAMES) -> None:
    """Check the installed Ray's minor version, then every one of ``names``.

    Raises:
        ConfigError: it says which Ray was found, what was expected, and what to install.

    """
    check_ray_version()
    if problems := [problem for name in names if (problem := name.problem())]:
        raise mismatch("; ".join(problems))


def check_ray_version() -> None:
    """Check the installed Ray's minor version, without importing it; raise :class:`ConfigError`."""
    if version("ray").split(".")[:2] != SUPPORTED_RAY.split("."):
        raise mismatch("another minor version has other private names")


def mismatch(found: str) -> ConfigError:
    """Return the error for a Ray that is not as it is used; ``found`` says in what."""
    return ConfigError(
        f"Ray {version('ray')} is installed, and Tandem needs {SUPPORTED_RAY}: {found}; "
        f"pip install 'ray[serve]=={SUPPORTED_RAY}.*'"
    )
