"""What crosses the network between a cluster's nodes: ``python tests/load/locality.py``.

Two workers, each in a network namespace (tests/support/services/network.py: root only), with a
replica of every stage on each; images of 224 px, and networks that take no time. The same load
twice: with Serve's own router between the stages, and with ours (app/serve/locality_router.py).
What counts is the bytes on the workers' links, less what they carry without load. Prints JSON.
"""

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from checked_load import CheckedLoad
from drawn_classes import Picture, draw, tiny_set
from machine import ROOT, describe
from ray_nodes import RayCluster, RayNode
from result_file import write_result
from serve_state import ServeState
from small_cluster import WORKER_CPUS, configuration, environment, wait_whole

from tests.support.services import network

ROUTERS = {
    "serve": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "near": "app.serve.locality_router:LocalityRouter",
}
BURST, EVERY_S = 4, 0.25
SIZE = 224  # px: what a member of ImageNet gets
READY_WITHIN_S, WARM_UP_S = 120.0, 5.0
RESULT = ROOT / "tests" / "load" / "results" / "locality.json"


def main(
    seconds: Annotated[float, typer.Option(help="of each load", min=5)] = 30.0,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Count bytes between two nodes with both routers."""
    if reason := network.why_not():
        raise SystemExit(f"no network of our own here: {reason}")
    network.enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # leave no cluster behind
    net = network.Network()
    routers = {}
    with temporary() as sets:
        model_set = tiny_set(sets / "set", SIZE, num_convolutions=0)
        pictures = draw(model_set, 16)
        for name, router in ROUTERS.items():
            with temporary() as folder:
                cluster = RayCluster(folder, environment(folder), WORKER_CPUS, net)
                try:
                    routers[name] = measured(cluster, model_set, pictures, router, seconds)
                finally:
                    cluster.stop()
            typer.echo(f"{name}: {routers[name]}", err=True)
    net.stop()
    saved = 1 - routers["near"]["kb_per_request"] / routers["serve"]["kb_per_request"]
    rates = {"offered_per_s": BURST / EVERY_S, "image_px": SIZE}
    result = {**describe(), **rates, "routers": routers, "saved": round(saved, 3)}
    write_result(result, json_file)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Give a folder with a short name: HAProxy keeps sockets deep below (97 characters)."""
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def measured(
    cluster: RayCluster, model_set: Path, pictures: list[Picture], router: str, seconds: float
) -> dict[str, Any]:
    """Deploy, load, and return what crossed the links."""
    state = ServeState(cluster)
    cluster.wait_for_head()
    state.replicas()  # the dashboard connects now, to the head
    workers = [cluster.add_worker(), cluster.add_worker()]
    config = configuration(model_set, cluster.head)
    for deployment in config["applications"][0]["deployments"]:
        if deployment["name"] != "Gateway":  # which HAProxy calls
            deployment["request_router_config"] = {"request_router_class": router}
    state.deploy(config)
    wait_whole(state, READY_WITHIN_S, "deployed")
    with CheckedLoad(workers[0].url, pictures, BURST, EVERY_S):
        time.sleep(WARM_UP_S)
    before = carried(workers)
    time.sleep(seconds)
    idle = carried(workers) - before
    before = carried(workers)
    with CheckedLoad(workers[0].url, pictures, BURST, EVERY_S) as load:
        time.sleep(seconds)
    crossed = carried(workers) - before - idle
    return {
        "requests": len(load.outcomes),
        "right": sum(one.kind == "right" for one in load.outcomes),
        "kb_per_request": round(crossed / len(load.outcomes) / 1e3, 1),
    }


def carried(workers: list[RayNode]) -> int:
    """Return the bytes that the workers' links have carried so far, both ways."""
    return sum(worker.place.num_bytes() for worker in workers)


if __name__ == "__main__":
    typer.run(main)
