"""configs/kuberay: says what cluster.yaml and the settings say, and every replica fits a pod."""

import importlib.util
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from app.environment import node_environment
from app.launch.config import ServeConfig
from app.launch.haproxy.command import max_connections

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "configs" / "kuberay"
CLUSTER = ROOT / "configs" / "cluster.yaml"


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", KUBERAY / "render.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return yaml.safe_load((KUBERAY / "rayservice.yaml").read_text("utf-8"))


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(service: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for group in groups(service) for c in group["template"]["spec"]["containers"]]


def test_the_file_is_what_render_writes(render):
    """Of the Ray in constraints.txt; the tests may run with another one."""
    written = (KUBERAY / "rayservice.yaml").read_text("utf-8")
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (locked,) = (line.removeprefix("ray==") for line in constraints if line.startswith("ray=="))
    of_installed = f'rayVersion: "{version("ray")}"'
    rendered = render.rendered().replace(of_installed, f'rayVersion: "{locked}"')
    assert written == rendered, "run: python configs/kuberay/render.py"


def test_it_serves_cluster_yaml(service):
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == ServeConfig.read(CLUSTER).as_dict()


def test_every_pod_has_the_nodes_environment(service, render):
    connections = {"RAY_SERVE_HAPROXY_MAXCONN": str(max_connections(2**20))}
    wanted = node_environment(render.HAPROXY) | connections
    for container in containers(service):
        given = container["env"]
        assert all(isinstance(one["value"], str) for one in given)
        assert {one["name"]: one["value"] for one in given} == wanted


def test_the_image_has_the_command_that_the_environment_names(render):
    dockerfile = (KUBERAY / "Dockerfile").read_text("utf-8")
    assert f"tandem environment --folder {render.HAPROXY.parent} " in dockerfile
    for copied in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}\n" in (ROOT / ".dockerignore").read_text("utf-8")


def deployments() -> list[Mapping[str, Any]]:
    return ServeConfig.read(CLUSTER).deployments


def test_a_worker_pod_holds_all_that_a_node_may(service):
    (container,) = containers(service)[1:]
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"]
    pod = int(container["resources"]["limits"]["cpu"])
    wanted = [
        one["max_replicas_per_node"] * one["ray_actor_options"]["num_cpus"] for one in deployments()
    ]
    assert len(wanted) == 4
    assert sum(wanted) <= pod


def test_a_nodes_death_takes_no_stage():
    """More replicas than one node may hold, of each stage."""
    for one in deployments():
        assert one["autoscaling_config"]["min_replicas"] > one["max_replicas_per_node"], one["name"]


def test_there_are_two_workers_and_room_for_every_replica(service):
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert 2 <= workers["minReplicas"] == workers["replicas"]
    assert workers["maxReplicas"] >= max(
        one["autoscaling_config"]["max_replicas"] / one["max_replicas_per_node"]
        for one in deployments()
    )


def test_the_probes_ask_ports_that_the_pod_has(service):
    known = {8265: "dashboard", 8000: "serve", 52365: "Ray's agent, its default"}
    port = ServeConfig.read(CLUSTER).http.port
    assert known[port] == "serve"
    for container in containers(service):
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in known
        assert port in {one["containerPort"] for one in container["ports"]}


def test_the_head_runs_no_replica(service):
    head, _ = groups(service)
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in groups(service):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
