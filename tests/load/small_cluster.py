"""The cluster's own configuration, with shares so small that one machine has room for its nodes."""

import time
from pathlib import Path
from typing import Any

from machine import ROOT
from ray_nodes import RayNode

from app.launch.config import ServeConfig
from models.manifest import read_manifest
from tests.support.services.network import Place

WORKER_CPUS = 2  # what Ray is told of a worker: room for a replica of each stage


CLUSTER = ROOT / "configs" / "cluster.yaml"


def configuration(model_set: Path, head: RayNode, path: Path = CLUSTER) -> dict[str, Any]:
    """Return a cluster's configuration with the tiny set and shares that fit this machine."""
    # On a network of its own nobody else is there.
    host = "127.0.0.1" if head.place == Place() else "0.0.0.0"
    config = ServeConfig.read(path).changed(
        http={"host": host, "port": head.http_port}, model_set=str(model_set)
    )
    config = config.changed(streams=1, compile_cache=None)
    config = config.changed(trace_exporter="none")
    content = config.fitted_to(read_manifest(model_set)).as_dict()
    (application,) = content["applications"]
    application.pop("autoscaling_policy", None)
    for deployment in application["deployments"]:
        scaling = deployment.pop("autoscaling_config")
        deployment["num_replicas"] = scaling["min_replicas"]
        deployment["ray_actor_options"] = {"num_cpus": 0.4}
    return content


def wait_whole(state, within_s, what, victims=frozenset()):
    """Wait until all replicas run, none of ``victims`` among them; return when that was."""
    deadline = time.monotonic() + within_s
    while True:
        if not victims & {one.pid for one in state.replicas()} and state.is_whole():
            return time.monotonic()
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not whole within {within_s:g} s: {state.told()}")
        time.sleep(0.2)
