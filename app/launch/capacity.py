"""Checks before Ray starts that the initial replicas fit the CPUs of this machine."""

from typing import Any

from app.errors import ConfigError

SERVE_DEFAULT_CPUS = 1.0  # num_cpus of a deployment that gives none
ALL_CORES = ("Gateway",)  # below one CPU these use every core of the machine


def check_capacity(content: dict[str, Any], cpus: int) -> None:
    """Raise :class:`ConfigError` if the replicas at the start ask for more than one machine has.

    That is ``cpus``, and as many of each as may be on a node.

    ``content`` is a configuration that was read and checked (:mod:`app.launch.config`).
    """
    for name, deployment in _deployments(content):
        least, most = _num_replicas(deployment), deployment.get("max_replicas_per_node")
        if most is not None and least > most:
            raise ConfigError(
                f"the configuration asks for {least} replicas of {name}, {most} of them on a node: "
                "this is one machine; take configs/laptop.yaml, or raise max_replicas_per_node"
            )
    asked = {name: _num_replicas(d) * _num_cpus(d) for name, d in _deployments(content)}
    if (total := sum(asked.values())) > cpus:
        told = ", ".join(f"{name} {share:g}" for name, share in asked.items())
        raise ConfigError(
            f"the configuration asks for {total:g} CPUs ({told}), this machine has {cpus}: take "
            "configs/laptop.yaml, lower num_replicas or num_cpus, or let tandem tune write one"
        )


def oversubscribed(content: dict[str, Any]) -> str | None:
    """Say which replicas would use the same cores; None if none would."""
    for name, deployment in _deployments(content):
        replicas, share = _num_replicas(deployment), _num_cpus(deployment)
        if name in ALL_CORES and replicas > 1 and share < 1:
            return (
                f"{replicas} replicas of {name} have {share:g} of a CPU each, and each would use "
                "all cores of its machine: give whole num_cpus (and affinity: true), or one replica"
            )
    return None


def _deployments(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (deployment["name"], deployment)
        for application in content["applications"]
        for deployment in application.get("deployments", [])
    ]


def _num_replicas(deployment: dict[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config") or {}
    least = scaling.get("initial_replicas") or scaling.get("min_replicas", 1)
    given = deployment.get("num_replicas")
    return int(given) if isinstance(given, int) else int(least)  # "auto" scales


def _num_cpus(deployment: dict[str, Any]) -> float:
    given = (deployment.get("ray_actor_options") or {}).get("num_cpus")
    return SERVE_DEFAULT_CPUS if given is None else float(given)
