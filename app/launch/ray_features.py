"""The private features of Ray that ``tandem serve`` depends on, each with a check of its presence.

If Ray has a public option, variable or function, that is used instead (the decision record lists
those considered). :mod:`app.launch.ray_internals` uses the names, and callers of its
``serve_client`` the methods of Serve's client.
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
    "no log monitor",
    "it uses 0.01 of a core",
    (RayName(NODE, "Node.start_log_monitor"),),
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
LAUNCH_FEATURES = (DEPLOY, CONTROLLER, LOG_MONITOR, DEATHS, ONE_MACHINE, FORKS)


def check_installed_ray(*, is_joining: bool = False) -> list[str]:
    """Look up every private name that the service uses; return warnings, as check_ray does.

    Raises:
        ConfigError: as check_ray. With ``is_joining`` also if the controller's state cannot be
            read: deploying deletes applications that are not listed, so the others must be known.

    """
    others = [feature for feature in LAUNCH_FEATURES if feature is not CONTROLLER]
    asking = replace(CONTROLLER, is_required=is_joining)
    return check_ray((*REPLICA_FEATURES, *others, asking))
