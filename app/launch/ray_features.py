"""What ``tandem serve`` leans on of Ray that it does not promise to keep, feature by feature.

What Ray has a public option, variable or function for is used through that instead (the decision
record says which was looked for). :mod:`app.launch.ray_internals` uses the names.
"""

from dataclasses import replace

from app.calls.ray_compatibility import check_ray
from app.calls.ray_features import REPLICA_FEATURES
from app.calls.ray_names import Feature, RayName

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
# What Serve's controller says it serves, with a time limit, and how its replicas are drained.
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
SIGNALS = Feature(
    "keeping SIGTERM from Ray while it starts",
    "a SIGTERM meanwhile ends the command with another status",
    (RayName("ray._private.utils", "set_sigterm_handler", ("sigterm_handler",)),),
)
LOG_MONITOR = Feature(
    "no log monitor",
    "it uses 0.01 of a core",
    (RayName(NODE, "Node.start_log_monitor"),),
)
ERRORS = Feature(
    "deaths of Ray's processes in a line",
    "each prints some 900 characters",
    (RayName("ray._private.worker", "print_to_stdstream", ("data",)),),
)
# A Ray of one machine has no use for its dashboard, nor for the autoscaler of nodes.
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
LAUNCH_FEATURES = (DEPLOY, CONTROLLER, SIGNALS, LOG_MONITOR, ERRORS, ONE_MACHINE, FORKS)


def check_installed_ray(*, is_joining: bool = False) -> list[str]:
    """Look up every private name that the service uses; return warnings, as check_ray does.

    Raises:
        ConfigError: as check_ray. Who ``is_joining`` a cluster needs to know whose applications are
            there already: to deploy deletes those that are not named.

    """
    others = [feature for feature in LAUNCH_FEATURES if feature is not CONTROLLER]
    asking = replace(CONTROLLER, is_required=is_joining)
    return check_ray((*REPLICA_FEATURES, *others, asking))
