"""A configuration that does not fit the machine is refused before Ray waits for it."""

from pathlib import Path

import pytest

from app.errors import ConfigError
from app.launch.checks import check_capacity, oversubscribed
from app.launch.config import ServeConfig
from tests.support.configurations import with_deployment

CONFIGS = Path(__file__).parents[3] / "configs"


def config(**gateway: object) -> ServeConfig:
    application = {
        "import_path": "app.main:build",
        "deployments": [{"name": "Gateway", **gateway}],
    }
    return ServeConfig.of({"applications": [application]})


@pytest.mark.parametrize(
    ("name", "cpus"),
    [("laptop", 1), ("separate", 2), ("xeon-one-socket", 32), ("xeon-two-sockets", 64)],
)
def test_each_file_fits_the_machine_it_is_for_and_leaves_some(name: str, cpus: int) -> None:
    served = ServeConfig.read(CONFIGS / f"{name}.yaml")
    check_capacity(served.deployments, cpus)
    assert oversubscribed(served.deployments) is None
    if cpus >= 32:
        with pytest.raises(ConfigError, match="lower num_replicas or num_cpus"):
            check_capacity(served.deployments, cpus - 5)  # it uses what is there, but for four


def test_the_message_names_both_numbers() -> None:
    served = config(num_replicas=7, ray_actor_options={"num_cpus": 4})
    with pytest.raises(ConfigError, match=r"asks for 28 CPUs \(Gateway 28\), this machine has 2"):
        check_capacity(served.deployments, 2)


@pytest.mark.parametrize(
    ("gateway", "fits"),
    [
        ({}, 1),  # Serve's default is a CPU
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 9}}, 3),
        ({"num_replicas": "auto", "autoscaling_config": {"initial_replicas": 2}}, 2),
        ({"autoscaling_config": {"min_replicas": "2", "max_replicas": "3"}}, 2),
        ({"num_replicas": "auto"}, 1),
        ({"num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}}, 2),
    ],
)
def test_what_is_asked_for(gateway: dict, fits: int) -> None:
    check_capacity(config(**gateway).deployments, fits)
    with pytest.raises(ConfigError):
        check_capacity(config(**gateway).deployments, fits - 1)


def test_replicas_that_would_share_all_cores_are_told() -> None:
    whole = config(num_replicas=2, ray_actor_options={"num_cpus": 1})
    shared = config(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
    assert "2 replicas of Gateway have 0.5 of a CPU each" in (
        oversubscribed(shared.deployments) or ""
    )
    assert oversubscribed(whole.deployments) is None


def test_a_clusters_configuration_is_not_for_one_machine() -> None:
    served = ServeConfig.read(CONFIGS / "cluster.yaml")
    told = (
        r"asks for 3 replicas of Gateway, 2 of them on a node: this is one machine; take .*laptop"
    )
    with pytest.raises(ConfigError, match=told):
        check_capacity(served.deployments, 1000)
    for deployment in served.deployments:
        options = {k: v for k, v in deployment.items() if k != "max_replicas_per_node"}
        served = with_deployment(served, options)
    check_capacity(served.deployments, 1000)
