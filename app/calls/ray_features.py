"""What replicas lean on of Ray that it does not promise to keep, feature by feature."""

from app.calls.ray_names import Feature, RayName

ROUTER = "ray.serve.request_router"
REPLICA, COMMON = "ray.serve._private.replica", "ray.serve._private.common"
METRICS = "ReplicaMetricsManager"

# app/deployments/loopback.py. Without it the gRPC servers of replicas, one of which unpickles what
# it is sent, would listen on every interface.
LOOPBACK = Feature(
    "gRPC servers on loopback",
    "they would listen on every interface",
    (
        RayName("grpc.aio._server", "Server.add_insecure_port", ("address",)),
        RayName("ray.util", "get_node_ip_address"),
    ),
    is_required=True,
)
# app/deployments/grpc_server.py.
GRPC_OPTIONS = Feature(
    "limits of Serve's gRPC servers",
    "gRPC clients send up to 4 MB ahead, and a message may have RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
    (
        RayName(
            "ray.serve._private.grpc_util",
            "DEFAULT_GRPC_SERVER_OPTIONS",
            entries=("grpc.max_receive_message_length",),
        ),
    ),
)
# app/deployments/access_log.py.
ACCESS_LOG = Feature(
    "skipping the access log where it is off",
    "Serve makes a record of each request and drops it",
    (
        RayName(
            "ray.serve._private.logging_utils",
            "log_access_log_filter",
            ("record",),
            reads=("serve_access_log",),
        ),
    ),
)
# app/calls/locality_router.py. Serve calls this interface alpha.
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
        RayName(ROUTER, "RequestRouter.queue_len_response_deadline_s"),
        RayName(ROUTER, "RunningReplica.get_queue_len", ("deadline_s",)),
        RayName(ROUTER, "RunningReplica.node_id"),
        RayName(ROUTER, "RunningReplica.replica_id"),
        RayName(ROUTER, "PendingRequest.routing_context"),
        RayName(ROUTER, "ReplicaID.unique_id"),
    ),
)
# app/calls/batched.py.
PICKLED_CALLS = Feature(
    "pickle for calls of stages",
    "Serve pickles them its own way, which takes longer",
    (
        RayName(
            "ray.serve.handle",
            "DeploymentHandle.options",
            ("request_serialization", "response_serialization"),
        ),
    ),
)
# app/deployments/serve_replica.py and replica_server.py.
DIRECT_REQUESTS = Feature(
    "plain requests past Serve's wrapper (direct_requests)",
    "all go through it",
    (
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
    ),
)
# serve_config.yaml; Ray 2.59 does not have it.
SURGE = Feature(
    "max_surge_percent in serve_config.yaml",
    "an update stops a replica before its successor is there; two replicas leave no gap",
    (RayName("ray.serve.schema", "DeploymentSchema.max_surge_percent"),),
)
REPLICA_FEATURES = (
    LOOPBACK,
    GRPC_OPTIONS,
    ACCESS_LOG,
    STAGE_ROUTER,
    PICKLED_CALLS,
    DIRECT_REQUESTS,
    SURGE,
)
