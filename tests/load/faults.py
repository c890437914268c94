"""What a cluster loses when something dies under load: ``python tests/load/faults.py``.

Three nodes on this machine (a head without replicas, two workers) serve configs/cluster.yaml, or
another cluster's configuration, with networks so small that two cores suffice. A steady load comes
in through one worker; every answer is compared with the networks' own. Each fault is a kill -9
while requests are under way. With ``head`` among them its state is in a redis-server of ours. The
result goes to tests/load/results/faults.json. network_faults.py has what needs a network.
"""

import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from checked_load import CheckedLoad, summary
from drawn_classes import draw, tiny_set
from fault_kinds import FAULTS, Setting
from machine import ROOT, describe, write_result
from ray_nodes import RayCluster
from serve_state import ServeState
from small_cluster import CLUSTER, WORKER_CPUS, configuration, wait_whole

from tests.support.redis_server import REDIS, running_redis
from tests.support.services.ray_head import haproxy_environment

BURST, EVERY_S = 6, 0.5
BEFORE_S, AFTER_S = 2.0, 2.0  # of load without a fault, around it
READY_WITHIN_S, RECOVERED_WITHIN_S = 180.0, 200.0
RESULT = ROOT / "tests" / "load" / "results" / "faults.json"


def main(
    fault: Annotated[list[str] | None, typer.Option(help=f"{', '.join(FAULTS)}; else all")] = None,
    config: Annotated[Path, typer.Option(help="of the cluster")] = CLUSTER,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Break one thing after the other on a cluster of our own; count what is lost."""
    names = fault or list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        raise SystemExit(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if "head" in names and REDIS is None:
        raise SystemExit("no head can come back here: install redis-server, or choose with --fault")
    # Told to end (timeout does), it must not leave its cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory("", "tf-", "/tmp", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        redis = stack.enter_context(running_redis(folder)) if "head" in names else None
        cluster = RayCluster(folder, haproxy_environment(folder), WORKER_CPUS, redis=redis)
        stack.callback(cluster.stop)
        result = {**describe(), **run(cluster, folder, names, config)}
    write_result(result, json_file)


def run(cluster: RayCluster, folder: Path, names: list[str], config: Path) -> dict[str, Any]:
    """Start and deploy, then one fault after the other; return the placement and the faults."""
    model_set = tiny_set(folder / "set")
    pictures = draw(model_set, 16)
    state = ServeState(cluster)
    cluster.wait_for_head()
    state.replicas()  # the dashboard connects now, to the head: no worker's end takes it along
    workers = [cluster.add_worker(), cluster.add_worker()]
    content = configuration(model_set, cluster.head, config)
    there = {deployment["name"] for deployment in content["applications"][0]["deployments"]}
    state.deploy(content)
    wait_whole(state, READY_WITHIN_S, "deployed")
    setting = Setting(cluster, state, entry=workers[0], other=workers[1])
    faults = {}
    for name in names:
        one = FAULTS[name]
        if one.deployment is not None and one.deployment not in there:
            typer.echo(f"{name}: {config.name} has no such deployment", err=True)
            continue
        wait_whole(state, RECOVERED_WITHIN_S, f"whole before {name}")
        placement, before = setting.placement(), {one.pid for one in state.replicas()}
        with CheckedLoad(setting.entry.url, pictures, BURST, EVERY_S) as load:
            time.sleep(BEFORE_S)
            load.wait_under_way(BURST - 2)
            at, under_way = time.monotonic(), load.num_under_way
            victims = one.strike(setting)
            recovered = wait_whole(state, RECOVERED_WITHIN_S, name, victims)
            time.sleep(AFTER_S)
        faults[name] = {
            "fault": one.told,
            "placement": placement,
            "under_way": under_way,
            **summary(load, at, recovered),
            "replicas_kept": len(before & {one.pid for one in state.replicas()}),
        }
        typer.echo(f"{name}: {faults[name]}", err=True)
    return {"faults": faults}


if __name__ == "__main__":
    typer.run(main)
