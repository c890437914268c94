"""Names of Ray that the service uses and Ray does not promise to keep, with how each is used.

Those of replicas are listed here, those of ``tandem serve`` in :mod:`app.launch.ray_internals`;
:mod:`app.calls.ray_compatibility` looks them up at start. Nothing of Ray is imported before that.
"""

import importlib
import inspect
from dataclasses import dataclass


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
REPLICA, COMMON = "ray.serve._private.replica", "ray.serve._private.common"
METRICS = "ReplicaMetricsManager"
# What of Serve's wrapper app/deployments/serve_replica.py does itself, and hands to its objects,
# and what of its HTTP server replica_server.py adds to.
WRAPPER_NAMES = (
    RayName(REPLICA, "start_asgi_http_server", ("app", "http_options")),
    RayName(REPLICA, "Replica._direct_ingress_asgi", ("scope", "receive", "send")),
    RayName(REPLICA, "Replica._on_request_cancelled", ("request_metadata", "e")),
    RayName(REPLICA, "Replica.max_queued_requests"),
    RayName(
        REPLICA,
        "Replica",
        attributes=(
            "_deployment_id",
            "_metrics_manager",
            "_replica_id",
            "_route_prefix",
            "_semaphore",
            "_user_callable_wrapper",
        ),
    ),
    RayName(REPLICA, "UserCallableWrapper", attributes=("_run_user_code_in_separate_thread",)),
    RayName(REPLICA, f"{METRICS}.inc_num_ongoing_requests", ("request_metadata",)),
    RayName(REPLICA, f"{METRICS}.dec_num_ongoing_requests", ("request_metadata",)),
    RayName(
        REPLICA,
        f"{METRICS}.record_request_metrics",
        ("route", "latency_ms", "is_error", "exception_type"),
    ),
    RayName(
        REPLICA,
        f"{METRICS}.record_ingress_request_metrics",
        (
            *("protocol", "method", "route", "app_name", "deployment_name", "latency_ms"),
            *("is_error", "status_code"),
        ),
    ),
    RayName("ray.serve._private.utils", "Semaphore.locked"),
    RayName("ray.serve._private.utils", "Semaphore.acquire"),
    RayName("ray.serve._private.utils", "Semaphore.release"),
    RayName("ray.serve._private.tracing_utils", "is_tracing_enabled"),
    RayName(
        COMMON,
        "RequestMetadata",
        (
            *("request_id", "internal_request_id", "call_method", "route", "app_name"),
            *("is_streaming", "_request_protocol", "_http_method", "is_direct_ingress"),
        ),
    ),
    RayName(COMMON, "RequestProtocol.HTTP"),
    RayName(
        "ray.serve.context",
        "_RequestContext",
        (
            *("route", "request_id", "_internal_request_id", "app_name"),
            "cancel_on_parent_request_cancel",
        ),
    ),
    RayName("ray.serve.context", "_serve_request_context"),
)
# What replicas lean on: the router of the stages (app/calls/locality_router.py), whose interface
# Serve calls alpha, the servers that app/deployments/loopback.py and grpc_server.py set up, and
# Serve's wrapper of a replica.
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
    *WRAPPER_NAMES,
    RayName("grpc.aio._server", "Server.add_insecure_port", ("address",)),
    RayName("ray.serve._private.grpc_util", "DEFAULT_GRPC_SERVER_OPTIONS"),
    RayName("ray.serve._private.grpc_util", "start_grpc_server"),
)
