"""What a cluster loses when something dies under load: ``python tests/load/faults.py``.

Three nodes on this machine (a head without replicas, two workers), two replicas of every stage,
networks so small that two cores suffice. A steady load comes in through one worker; every answer is
compared with the networks' own. Each fault is a kill -9 while requests are under way. The result
goes to tests/load/results/faults.json.
"""

import json
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
from machine import ROOT, describe
from ray_nodes import RayCluster
from serve_state import ServeState

from app.config_file import for_members, read_config, with_overrides
from app.haproxy import HaproxyCommand
from app.settings import HAPROXY_COMMAND, node_environment
from models.manifest import read_manifest

BURST, EVERY_S = 6, 0.5
BEFORE_S, AFTER_S = 2.0, 2.0  # of load without a fault, around it
READY_WITHIN_S, RECOVERED_WITHIN_S = 180.0, 120.0
RESULT = ROOT / "tests" / "load" / "results" / "faults.json"


def main(
    fault: Annotated[list[str] | None, typer.Option(help=", ".join(FAULTS))] = None,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Break one thing after the other on a cluster of our own; count what is lost."""
    names = fault or list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        raise SystemExit(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    # Told to end (timeout does), it must not leave its cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory(prefix="tf-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        folder = Path(temp)
        cluster = RayCluster(folder, environment(folder), worker_cpus=2)
        try:
            result = {**describe(), **run(cluster, folder, names)}
        finally:
            cluster.stop()
    text = json.dumps(result, indent=2)
    typer.echo(text)
    json_file.write_text(text + "\n", "utf-8")


def environment(folder: Path) -> dict[str, str]:
    """Return what ``tandem environment`` gives every node, and files apart from other clusters'."""
    HaproxyCommand(folder / HAPROXY_COMMAND, ports=None).write()
    return node_environment(folder / HAPROXY_COMMAND) | {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/serve/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/serve/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/serve",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/serve/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/serve/metrics.sock",
        "PYTHONPATH": str(ROOT),
    }


def run(cluster: RayCluster, folder: Path, names: list[str]) -> dict[str, Any]:
    """Start and deploy, then one fault after the other; return the placement and the faults."""
    model_set = tiny_set(folder / "set")
    pictures = draw(model_set, 16)
    state = ServeState(cluster)
    cluster.wait_for_head()
    state.replicas()  # the dashboard connects now, to the head: no worker's end takes it along
    workers = [cluster.add_worker(), cluster.add_worker()]
    state.deploy(configuration(model_set, cluster.head.http_port))
    wait_whole(state, READY_WITHIN_S, "deployed")
    setting = Setting(cluster, state, entry=workers[0], other=workers[1])
    faults = {}
    for name in names:
        one = FAULTS[name]
        wait_whole(state, RECOVERED_WITHIN_S, f"whole before {name}")
        placement = setting.placement()
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
        }
        typer.echo(f"{name}: {faults[name]}", err=True)
    return {"faults": faults}


def configuration(model_set: Path, port: int) -> dict[str, Any]:
    """Return configs/cluster.yaml with the tiny set and shares that fit this machine."""
    content = read_config(ROOT / "configs" / "cluster.yaml")
    content = with_overrides(content, str(model_set), "127.0.0.1", port)
    application = content["applications"][0]
    application["args"] |= {"streams": 1, "compile_cache": None, "trace_dir": None}
    application["args"] |= {"trace_exporter": "none"}
    application.pop("autoscaling_policy", None)
    config = for_members(content, read_manifest(model_set))
    for deployment in config["applications"][0]["deployments"]:
        deployment.pop("autoscaling_config", None)
        deployment |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.4}}
    return config


def wait_whole(
    state: ServeState, within_s: float, what: str, victims: frozenset[int] = frozenset()
) -> float:
    """Wait until all replicas run, none of ``victims`` among them; return when that was."""
    deadline = time.monotonic() + within_s
    while True:
        if not victims & {one.pid for one in state.replicas()} and state.is_whole():
            return time.monotonic()
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not whole within {within_s:g} s: {state.told()}")
        time.sleep(0.2)


if __name__ == "__main__":
    typer.run(main)
