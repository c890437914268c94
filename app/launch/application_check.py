"""Refuses, before Ray starts, configurations that Serve accepts but this service cannot run with.

The functions raise :class:`ConfigError`, which names the offending values and a remedy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import ConfigError
from app.setting_values import QueueConfig
from app.settings import Settings

IMPORT_PATH = "app.main:build"  # of our application; a file may have other applications too
SERVE_DEFAULT_GRACE_S = 20.0  # graceful_shutdown_timeout_s of a deployment that sets none
SERVE_DEFAULT_CPUS = 1.0  # num_cpus of a deployment that sets none
ALL_CORES = ("Gateway",)  # with less than one CPU, these use every core of the machine
HUBS = ("Feedback", "Traffic", "Sets")  # deployments of one replica, without a CPU by default
WITHOUT_USER_CONFIG = ("Decoder", "Combiner", *HUBS)


def own_index(content: Mapping[str, Any]) -> int:
    """Return the index of our application in a configuration: the first with our import_path."""
    applications = content["applications"]
    for index, application in enumerate(applications):
        if application["import_path"] == IMPORT_PATH:
            return index
    raise ConfigError(
        f"no application has import_path: {IMPORT_PATH}; see serve_config.yaml in the project"
    )


def own_application(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our application's part of a configuration."""
    application: Mapping[str, Any] = content["applications"][own_index(content)]
    return application


def check_listeners(content: Mapping[str, Any], request_timeout_s: float) -> None:
    """Check the options of the HTTP and gRPC listeners, which all applications share."""
    if content.get("proxy_location") == "Disabled":
        raise ConfigError(
            "proxy_location: Disabled: nobody would listen for clients; take EveryNode or HeadOnly"
        )
    for options in ("http_options", "grpc_options"):
        limit_s = (content.get(options) or {}).get("request_timeout_s")
        if limit_s is not None and limit_s <= request_timeout_s:
            raise ConfigError(
                f"{options}.request_timeout_s is {limit_s:g}, and args.request_timeout_s "
                f"{request_timeout_s:g}: Serve would answer first, and not in this "
                "service's form; leave out the first"
            )


def check_application(application: Mapping[str, Any], settings: Settings) -> None:
    """Check the options of our application and its deployments."""
    deployments = application.get("deployments", [])
    counts = Counter(deployment["name"] for deployment in deployments)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"deployments has {twice[0]} twice: the second would win; leave one out")
    check_route_prefix(application.get("route_prefix", "/"))
    _check_grace(deployments, settings.request_timeout_s)
    for deployment in deployments:
        if deployment["name"] == "Gateway":
            _check_ongoing(deployment, settings.max_concurrent_requests)
        if deployment.get("user_config"):
            _check_user_config(deployment, settings.max_files)


def check_route_prefix(prefix: str | None) -> None:
    """Check the route prefix, below which the application's paths are."""
    if prefix is None:
        raise ConfigError("route_prefix: null: nobody could reach the service; leave it out, or /")
    if not prefix.startswith("/") or (prefix != "/" and prefix.endswith("/")):
        right = f"/{prefix.strip('/')}"
        raise ConfigError(
            f"route_prefix is {prefix!r}: it begins with a slash and ends with none: {right!r}"
        )
    if wrong := set(prefix) & set("{}?# \"'<>"):
        raise ConfigError(f"route_prefix is {prefix!r}: {min(wrong)!r} has no place in a path")


def _check_grace(deployments: list[Mapping[str, Any]], request_timeout_s: float) -> None:
    """Refuse deployments whose grace period is shorter than the time limit of a request."""
    grace_s = {"Gateway": None} | {
        deployment["name"]: deployment.get("graceful_shutdown_timeout_s")
        for deployment in deployments
    }
    for name, own_s in grace_s.items():
        waits_s = SERVE_DEFAULT_GRACE_S if own_s is None else own_s
        if waits_s < request_timeout_s:
            default = " (Serve's default)" if own_s is None else ""
            raise ConfigError(
                f"{name} has a graceful_shutdown_timeout_s of {waits_s:g}{default}, and a request "
                f"has a request_timeout_s of {request_timeout_s:g} s: an update would cut "
                "answers that are still in time; raise the first, or lower the second"
            )


def _check_ongoing(gateway: Mapping[str, Any], ours: int) -> None:
    """Refuse a Gateway for which Serve's max_ongoing_requests is below our own request limit."""
    ongoing = gateway.get("max_ongoing_requests")
    if ongoing is not None and ongoing < ours:
        raise ConfigError(
            f"Gateway has max_ongoing_requests of {ongoing}, and args.max_concurrent_requests is "
            f"{ours}: Serve would refuse first, and not in this service's form; raise the first, "
            "or lower the second"
        )


def _check_user_config(deployment: Mapping[str, Any], max_files: int) -> None:
    name = deployment["name"]
    if name in WITHOUT_USER_CONFIG:
        raise ConfigError(f"{name} takes no user_config: give it to the Gateway or to a member")
    try:
        QueueConfig.of(deployment["user_config"], max_files)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from error


def check_capacity(deployments: Sequence[Mapping[str, Any]], cpus: int) -> None:
    """Raise :class:`ConfigError` if the initial replicas do not fit one machine.

    Their ``num_cpus`` may be ``cpus`` together. A deployment may also have at most
    ``max_replicas_per_node`` of them.
    """
    for deployment in deployments:
        name, least = deployment["name"], _num_replicas(deployment)
        most = deployment.get("max_replicas_per_node")
        if most is not None and least > most:
            raise ConfigError(
                f"the configuration asks for {least} replicas of {name}, {most} of them on a node: "
                "this is one machine; take configs/laptop.yaml, or raise max_replicas_per_node"
            )
    needed = {d["name"]: _num_replicas(d) * _num_cpus(d) for d in deployments}
    if (total := sum(needed.values())) > cpus:
        shares = ", ".join(f"{name} {share:g}" for name, share in needed.items())
        raise ConfigError(
            f"the configuration asks for {total:g} CPUs ({shares}), this machine has {cpus}: take "
            "configs/laptop.yaml, or lower num_replicas or num_cpus"
        )


def oversubscribed(deployments: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on replicas that would use the same cores; None if there are none."""
    for deployment in deployments:
        name, replicas = deployment["name"], _num_replicas(deployment)
        share = _num_cpus(deployment)
        if name in ALL_CORES and replicas > 1 and share < 1:
            return (
                f"{replicas} replicas of {name} have {share:g} of a CPU each, and each would use "
                "all cores of its machine: give whole num_cpus (and affinity: true), or one replica"
            )
    return None


def _num_replicas(deployment: Mapping[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config") or {}
    least = scaling.get("initial_replicas") or scaling.get("min_replicas", 1)
    asked = deployment.get("num_replicas")
    return int(asked) if isinstance(asked, int) else int(least)  # for "auto", the minimum


def _num_cpus(deployment: Mapping[str, Any]) -> float:
    options = deployment.get("ray_actor_options")
    if options is None and deployment["name"] in HUBS:
        return 0.0
    asked = (options or {}).get("num_cpus")
    return SERVE_DEFAULT_CPUS if asked is None else float(asked)
