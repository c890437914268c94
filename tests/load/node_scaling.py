"""Images per second of 1, 2, 4 and 8 nodes: ``python tests/load/node_scaling.py``.

The networks wait 400 ms a batch in place of computing (tests/support/waiting_networks.py), so what
is measured is whether the nodes, their HAProxies and Serve get in each other's way; two cores carry
them all. Each node holds one whole graph, and callers keep it busy through the nodes by turns.
Where network namespaces are allowed, every node has one, 1 ms from the others.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from machine import ROOT, describe, write_result
from network_kinds import DELAY_MS
from null_set import small_photos, write_null_set
from ray_nodes import RayCluster
from serve_state import ServeState
from small_cluster import configuration, wait_whole

from app.bench.load import drawn_photos
from app.environment import AT_REST
from tests.support.services import network
from tests.support.services.ray_head import haproxy_environment
from tests.support.waiting_networks import BATCH_S

CONFIG = ROOT / "configs" / "cluster-whole.yaml"
RESULT = ROOT / "tests" / "load" / "results" / "node-scaling.json"
BATCH, CALLERS = 4, 8  # images of a full batch; callers of each node, two batches
WARM_S, AGAIN_AFTER_S = 15.0, 1.0
READY_WITHIN_S = 600.0
# All of a busy machine's nodes are late at times; none is to be given up for it.
LATE = {"RAY_health_check_failure_threshold": "100", "RAY_agent_register_timeout_ms": "300000"}


def main(
    nodes: Annotated[str, typer.Option(help="how many, ascending")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option(help="of each measurement")] = 30.0,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Add nodes to a cluster of our own, and load it each time."""
    if (no_network := network.why_not()) is None:
        network.enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # leave no cluster behind
    told = {"batch_ms": BATCH_S * 1e3, "max_batch": BATCH, "callers_per_node": CALLERS}
    where = "namespaces, 1 ms apart" if no_network is None else f"loopback: {no_network}"
    facts = {**describe(), **told, "network": where}
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory("", "ts-", "/tmp", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        net = network.Network(DELAY_MS) if no_network is None else None
        environment = {**LATE, **AT_REST, **haproxy_environment(folder)}
        is_supervised = net is not None  # a late agent ends a node of a busy machine
        cluster = RayCluster(folder, environment, 1, net, is_supervised=is_supervised)
        stack.callback(cluster.stop)
        content = _content(write_null_set(folder / "set"), cluster)
        photos = small_photos(drawn_photos(16))
        state = ServeState(cluster)
        cluster.wait_for_head()
        rows: list[dict[str, Any]] = []
        for number in map(int, nodes.split(",")):
            while len(cluster.workers) < number:
                cluster.add_worker()
            _gateway(content)["num_replicas"] = number
            state.deploy(content)
            wait_whole(state, READY_WITHIN_S, f"{number} nodes")
            urls = [f"{node.url}/v1/classify?top_k=1" for node in cluster.workers]
            rows.append({"nodes": number, **asyncio.run(_measured(urls, photos, seconds))})
            linear = number * rows[0]["images_per_s"] / rows[0]["nodes"]
            rows[-1]["of_linear"] = round(rows[-1]["images_per_s"] / linear, 3)
            typer.echo(str(rows[-1]), err=True)
            write_result({**facts, "rows": rows}, json_file)  # a later one may fail


def _content(model_set: Path, cluster: RayCluster) -> dict[str, Any]:
    content = configuration(model_set, cluster.head, CONFIG)
    content["applications"][0]["args"] |= {
        "preprocess": "tests.support.waiting_networks:images",
        "batch_sizes": [1, BATCH],
    }
    gateway = _gateway(content)
    gateway["max_replicas_per_node"] = 1
    gateway["ray_actor_options"] = {"num_cpus": 1}
    return content


def _gateway(content: dict[str, Any]) -> dict[str, Any]:
    deployments = content["applications"][0]["deployments"]
    return next(one for one in deployments if one["name"] == "Gateway")


async def _measured(urls: list[str], photos: list[bytes], seconds: float) -> dict[str, Any]:
    """Let callers of all nodes ask again as soon as they are answered; count after the warm-up."""
    statuses: Counter[int] = Counter()
    began = time.monotonic() + WARM_S
    ends = began + seconds

    async def call(number: int) -> None:
        while time.monotonic() < ends:
            body, status = photos[number % len(photos)], 0
            try:
                async with session.post(urls[number % len(urls)], data=body) as answer:
                    await answer.read()
                status = answer.status
            except aiohttp.ClientError:  # a node's HAProxy was replaced
                await asyncio.sleep(AGAIN_AFTER_S)
            number += 1
            if began <= time.monotonic() < ends:
                statuses[status] += 1

    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        calls = [asyncio.create_task(call(number)) for number in range(CALLERS * len(urls))]
        await asyncio.sleep(WARM_S)
        psutil.cpu_percent()
        await asyncio.gather(*calls)
    return {
        "images_per_s": round(statuses[200] / seconds, 2),
        "refused": statuses.total() - statuses[200],
        "machine_cpu_percent": psutil.cpu_percent(),
    }


if __name__ == "__main__":
    typer.run(main)
