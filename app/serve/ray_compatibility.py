"""Checks the installed Ray: its version, and the private names that the application uses.

Ray does not promise to keep these names. A missing name, or other parameters, would otherwise show
as a service that half works. So they are looked up by feature before any is imported. A
:class:`Feature` that does not fit is left out with a warning, and Ray's default applies. It is
required only if it protects the service, or if nothing could be deployed without it. This module
lists the replicas' features, :mod:`app.launch.ray_features` those of ``tandem serve``.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from app.errors import ConfigError

ROUTER = "ray.serve.request_router"
GRPC_UTIL = "ray.serve._private.grpc_util"
# The minor versions that pass the tests; pyproject.toml allows one more.
TESTED_RAY = ("2.59", "2.60")


@dataclass(frozen=True)
class RayName:
    """A private name: its module, and the parts of it that are used."""

    module: str  # that defines it
    name: str  # dotted, below the module
    parameters: tuple[str, ...] = ()  # that are passed
    attributes: tuple[str, ...] = ()  # of a class, that its ``__init__`` sets
    entries: tuple[str, ...] = ()  # of a list of pairs, the first halves that must be there

    def problem(self) -> str | None:
        """Return how the installed name differs from its use; None if it fits."""
        place = f"{self.module}.{self.name}"
        try:
            value = _resolved(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return f"{place} is not there"
        for verb, wanted, there in (
            ("takes", self.parameters, _parameters),
            ("has", self.attributes, _set_in_init),
            ("lists", self.entries, _entries),
        ):
            if wanted and (lacking := set(wanted) - there(value)):
                return f"{place} {verb} no {', '.join(sorted(lacking))}"
        return None


@dataclass(frozen=True)
class Feature:
    """Private names that are used together."""

    name: str  # in warnings
    without: str  # a sentence on how the service runs without it
    names: tuple[RayName, ...]  # all must fit
    is_required: bool = False  # whether the service refuses to start without it

    def problem(self) -> str | None:
        problems = [problem for name in self.names if (problem := name.problem())]
        return "; ".join(problems) or None

    def fits(self) -> bool:
        return self.problem() is None


def _resolved(owner: object, dotted: str) -> object:
    for part in dotted.split("."):
        is_field = part in _fields(owner)
        owner = None if is_field else getattr(owner, part)
    return owner


def _fields(owner: object) -> Iterable[str]:
    """Return the fields of a dataclass or pydantic model, which are no attributes of its class."""
    declared = getattr(owner, "__dataclass_fields__", None) or getattr(owner, "model_fields", {})
    return declared if isinstance(declared, dict) else ()


def _parameters(value: object) -> set[str]:
    return set(inspect.signature(value).parameters) if callable(value) else set()


def _set_in_init(value: object) -> set[str]:
    return {
        name
        for parent in getattr(value, "__mro__", ())
        if inspect.isfunction(init := vars(parent).get("__init__"))
        for name in init.__code__.co_names
    }


def _entries(value: object) -> set[str]:
    return {name for name, _ in value} if isinstance(value, list) else set()


# app/serve/replica.py. Without it the replicas' gRPC servers, one of which unpickles what
# it receives, would listen on every interface.
LOOPBACK = Feature(
    "gRPC servers on loopback",
    "they would listen on every interface",
    (
        RayName("grpc.aio._server", "Server.add_insecure_port", ("address",)),
        RayName("ray.util", "get_node_ip_address"),
    ),
    is_required=True,
)
# app/serve/replica.py.
GRPC_OPTIONS = Feature(
    "limits of Serve's gRPC servers",
    "gRPC clients send up to 4 MB ahead, and a message may have RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
    (
        RayName(
            GRPC_UTIL, "DEFAULT_GRPC_SERVER_OPTIONS", entries=("grpc.max_receive_message_length",)
        ),
    ),
)
# app/serve/replica.py; Ray 2.59 lacks reflection.
REFLECTION = Feature(
    "gRPC reflection v1",
    "gRPC clients that ask for it find no description; some ask for v1alpha then",
    (
        RayName(GRPC_UTIL, "enable_server_reflection", ("server",)),
        RayName(GRPC_UTIL, "get_service_names", ("generic_rpc_handlers",)),
        RayName(
            GRPC_UTIL,
            "gRPCGenericServer",
            ("service_handler_factory",),
            attributes=("generic_rpc_handlers",),
        ),
        RayName(GRPC_UTIL, "gRPCGenericServer.add_passthrough_service", ("service_name",)),
    ),
)
# app/serve/locality_router.py. Serve calls this interface alpha.
STAGE_ROUTER = Feature(
    "the router of stages that are deployments of their own",
    "Serve's own router chooses their replicas",
    (
        RayName(ROUTER, "FIFOMixin"),
        RayName(ROUTER, "RequestRouter", ("deployment_id", "kwargs")),
        RayName(ROUTER, "RequestRouter.choose_replicas", ("candidate_replicas", "pending_request")),
        RayName(ROUTER, "RequestRouter.on_send_request", ("replica_id",)),
        RayName(
            ROUTER, "RequestRouter.on_new_queue_len_info", ("replica_id", "num_ongoing_requests")
        ),
        RayName(ROUTER, "RequestRouter.on_replica_actor_died", ("replica_id",)),
        RayName(ROUTER, "RequestRouter.on_replica_actor_unavailable", ("replica_id",)),
        RayName(ROUTER, "RequestRouter.update_replicas", ("replicas",)),
        RayName(ROUTER, "RequestRouter.replica_queue_len_cache"),
        RayName(ROUTER, "RunningReplica.get_queue_len", ("deadline_s",)),
        RayName(ROUTER, "RunningReplica.node_id"),
        RayName(ROUTER, "RunningReplica.replica_id"),
        RayName(ROUTER, "PendingRequest.routing_context"),
        RayName(ROUTER, "ReplicaID.unique_id"),
    ),
)
# serve_config.yaml; Ray 2.59 lacks it.
SURGE = Feature(
    "max_surge_percent in serve_config.yaml",
    "an update stops a replica before its successor is there; two replicas leave no gap",
    (RayName("ray.serve.schema", "DeploymentSchema.max_surge_percent"),),
)
REPLICA_FEATURES = (LOOPBACK, GRPC_OPTIONS, REFLECTION, STAGE_ROUTER, SURGE)


def check_ray(features: Iterable[Feature] = REPLICA_FEATURES) -> list[str]:
    """Return a warning for each feature that is left out, and for an untested version.

    Raises:
        ConfigError: Ray is too old, or lacks a required feature. The message has Ray's version, the
            expected one, and what to install.
    """
    untested = check_ray_version()
    warnings = [] if untested is None else [untested]
    refused = []
    for feature in features:
        if (problem := feature.problem()) is None:
            continue
        if feature.is_required:
            refused.append(f"{problem} ({feature.name}: {feature.without})")
        else:
            warnings.append(
                f"Ray {version('ray')}: {problem}. Left out: {feature.name}: {feature.without}"
            )
    if refused:
        raise mismatch("; ".join(refused))
    return warnings


def check_ray_version() -> str | None:
    """Return a warning if the installed Ray is newer than tested; does not import it.

    Raises:
        ConfigError: Ray is older than every tested version.
    """
    installed = _minor(version("ray"))
    if installed < _minor(TESTED_RAY[0]):
        raise mismatch("an older version has other private names")
    if installed > _minor(TESTED_RAY[-1]):
        return (
            f"Ray {version('ray')} is newer than the versions that Tandem was tested with "
            f"({', '.join(TESTED_RAY)}): where something fails, {_install()}"
        )
    return None


def mismatch(problem: str) -> ConfigError:
    """Return the error for a Ray that the service cannot run with; ``problem`` says why."""
    return ConfigError(
        f"Ray {version('ray')} is installed, and Tandem needs {TESTED_RAY[0]} or later: {problem}; "
        f"{_install()}"
    )


def _install() -> str:
    return f"pip install 'ray[serve]=={TESTED_RAY[-1]}.*'"


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
