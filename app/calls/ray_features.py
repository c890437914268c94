"""The private features of Ray that replicas depend on, each with a check of its presence."""

from app.calls.ray_names import Feature, RayName

ROUTER = "ray.serve.request_router"
GRPC_UTIL = "ray.serve._private.grpc_util"

# app/deployments/grpc_server.py. Without it the replicas' gRPC servers, one of which unpickles what
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
# app/deployments/grpc_server.py.
GRPC_OPTIONS = Feature(
    "limits of Serve's gRPC servers",
    "gRPC clients send up to 4 MB ahead, and a message may have RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
    (
        RayName(
            GRPC_UTIL,
            "DEFAULT_GRPC_SERVER_OPTIONS",
            entries=("grpc.max_receive_message_length",),
        ),
    ),
)
# app/deployments/grpc_server.py; Ray 2.59 lacks reflection.
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
