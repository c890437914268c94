"""The configurations for other places are serve_config.yaml but for what is listed here."""

from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import DeploymentSchema

from app.launch.config import ServeConfig

ROOT = Path(__file__).parents[3]
STAGES = ("Decoder", "resnet50", "densenet169")  # that serve_config.yaml has in the Gateway

# Serve's own 25 % elsewhere: a second whole set of replicas would not find the CPUs. Ray 2.59 has
# no such option, and it is left out there.
SURGE = {"Gateway.max_surge_percent"} & {f"Gateway.{k}" for k in DeploymentSchema.model_fields}
EVERY_HUNDREDTH = {"tracing_config.sampling_ratio"}
XEON = (
    EVERY_HUNDREDTH
    | SURGE
    | {
        "args.streams",
        "args.batch_sizes",
        "args.decode_threads",
        "args.max_concurrent_requests",
        "Gateway.num_replicas",
        "Gateway.max_ongoing_requests",
        "Gateway.ray_actor_options",
    }
)
CLUSTER = (
    EVERY_HUNDREDTH
    | SURGE
    | {
        "http_options.host",
        "args.decode_threads",
        "application.autoscaling_policy",
        "Gateway.autoscaling_config",
        "Gateway.max_replicas_per_node",
        "Gateway.graceful_shutdown_timeout_s",
        "Gateway.health_check_timeout_s",
        "Gateway.ray_actor_options",
    }
)
APART = {"args.batch_sizes", "args.decoder", "args.members", *STAGES}
DIFFERENCES = {
    "laptop.yaml": set(),
    "separate.yaml": APART | SURGE | {"Gateway.ray_actor_options"},
    "xeon-one-socket.yaml": XEON,
    "xeon-two-sockets.yaml": XEON,
    "cluster.yaml": APART | CLUSTER,
    "majority-vote.yaml": {"args.combine"},
    "mirroring.yaml": {"args.preprocess"},
    "cluster-whole.yaml": CLUSTER | {"args.streams", "args.batch_sizes"},
}


def options(content: dict[str, Any]) -> dict[str, Any]:
    """Return every option by its place; a stage beside the Gateway is one."""
    (application,) = content["applications"]
    flat = {
        f"application.{k}": v for k, v in application.items() if k not in ("args", "deployments")
    }
    flat |= {f"args.{k}": v for k, v in application["args"].items()}
    for deployment in application["deployments"]:
        name = deployment["name"]
        own = {f"Gateway.{k}": v for k, v in deployment.items()}
        flat |= own if name == "Gateway" else {name: deployment}
    for key, value in content.items():
        if key != "applications":
            flat |= (
                {f"{key}.{k}": v for k, v in value.items()}
                if isinstance(value, dict)
                else {key: value}
            )
    return flat


def test_every_configuration_is_listed():
    found = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert found == set(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_nothing_else_differs(name):
    ours, theirs = (
        options(ServeConfig.read(ROOT / path).as_dict())
        for path in ("serve_config.yaml", f"configs/{name}")
    )
    absent = object()
    different = {k for k in ours | theirs if ours.get(k, absent) != theirs.get(k, absent)}
    assert different == DIFFERENCES[name]


def test_members_are_served_alike():
    """Every image visits both: they have the same options, so they grow alike."""
    for name in ("separate.yaml", "cluster.yaml"):
        content = options(ServeConfig.read(ROOT / "configs" / name).as_dict())
        assert {**content["resnet50"], "name": ""} == {**content["densenet169"], "name": ""}
