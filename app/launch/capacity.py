"""Checks before Ray starts that the initial replicas fit the CPUs of this machine."""

from collections.abc import Mapping
from typing import Any

from app.errors import ConfigError
from app.launch.config import ServeConfig

SERVE_DEFAULT_CPUS = 1.0  # num_cpus of a deployment that gives none
ALL_CORES = ("Gateway",)  # below one CPU these use every core of the machine


def check_capacity(config: ServeConfig, cpus: int) -> None:
    """Raise :class:`ConfigError` if the initial replicas do not fit one machine.

    They may need ``cpus`` CPUs at most, and be no more than ``max_replicas_per_node`` of each.
    """
    for deployment in config.deployments:
        name, least = deployment["name"], _num_replicas(deployment)
        most = deployment.get("max_replicas_per_node")
        if most is not None and least > most:
            raise ConfigError(
                f"the configuration asks for {least} replicas of {name}, {most} of them on a node: "
                "this is one machine; take configs/laptop.yaml, or raise max_replicas_per_node"
            )
    asked = {d["name"]: _num_replicas(d) * _num_cpus(d) for d in config.deployments}
    if (total := sum(asked.values())) > cpus:
        told = ", ".join(f"{name} {share:g}" for name, share in asked.items())
        raise ConfigError(
            f"the configuration asks for {total:g} CPUs ({told}), this machine has {cpus}: take "
            "configs/laptop.yaml, lower num_replicas or num_cpus, or let tandem tune write one"
        )


def oversubscribed(config: ServeConfig) -> str | None:
    """Say which replicas would use the same cores; None if none would."""
    for deployment in config.deployments:
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
    given = deployment.get("num_replicas")
    return int(given) if isinstance(given, int) else int(least)  # "auto" scales


def _num_cpus(deployment: Mapping[str, Any]) -> float:
    given = (deployment.get("ray_actor_options") or {}).get("num_cpus")
    return SERVE_DEFAULT_CPUS if given is None else float(given)
