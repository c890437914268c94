"""What callers see when the network of a node is bad: ``python tests/load/network_faults.py``.

A head and three workers, each with an address of its own, and 1 ms from each to each, serve a
cluster's configuration behind the load balancer of configs/haproxy. The load comes in through that;
every answer is compared with the networks' own. Needs root (tests/support/services/network.py).
The result goes to tests/load/results/network-WHOLE.json.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from balancer import Balancer
from checked_load import CheckedLoad, Outcome, summary
from drawn_classes import Picture, draw, tiny_set
from machine import ROOT, describe, write_result
from network_kinds import DELAY_MS, ROWS, Row, Scene
from ray_nodes import RayCluster, is_ok
from serve_state import ServeState
from small_cluster import CLUSTER, WORKER_CPUS, configuration, wait_whole

from tests.support.redis_server import REDIS, running_redis
from tests.support.services import network
from tests.support.services.ray_head import haproxy_environment

NUM_WORKERS, BURST, EVERY_S = 3, 6, 0.5
BEFORE_S, AFTER_S = 3.0, 3.0  # of load without a fault, around it
READY_WITHIN_S, RECOVERED_WITHIN_S = 240.0, 240.0
LEFT_WITHIN_S = 3.0  # a node that is cut off or slow shall get nothing new after that
SLOW_S = 2.0  # an answer that a caller would call late
# pip install libfaketime: Debian's own, 0.9.10, ends each sleep of Python with an error.
PACKAGE = importlib.util.find_spec("libfaketime")
WAITS = "import threading, time; time.sleep(0.01); threading.Event().wait(0.01)"
RESULTS = ROOT / "tests" / "load" / "results"


def why_not(name: str, names: Sequence[str]) -> str | None:
    """Return why a row cannot be had here, or with the others; None if it can."""
    if ROWS[name].needs == "clock" and not _sets_clocks():
        return "libfaketime is not installed, or Python does not wait under it"
    if ROWS[name].needs == "redis" and REDIS is None:
        return "redis-server is not installed"
    if name == "head-alone" and any(ROWS[other].needs == "redis" for other in names):
        return "the head has its state in Redis: choose this row alone"
    return None


def _clock(file: Path) -> dict[str, str]:
    folder = Path((PACKAGE and PACKAGE.origin) or "").parent
    return {
        "LD_PRELOAD": str(folder / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _sets_clocks() -> bool:
    """Return whether a program sleeps and waits under libfaketime."""
    if PACKAGE is None:
        return False
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("+30s\n")
        file.flush()
        program = [sys.executable, "-c", WAITS]
        environment = {**os.environ, **_clock(Path(file.name))}
        try:
            return subprocess.run(program, env=environment, timeout=10, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def main(
    row: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ROWS)}; else all")] = None,
    config: Annotated[Path, typer.Option(help="of the cluster")] = CLUSTER,
    json_file: Annotated[Path | None, typer.Option("--json", help="write it here")] = None,
) -> None:
    """Do one thing after the other to a node of a cluster of our own; count what is lost."""
    names = row or list(ROWS)
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if reason := network.why_not():
        raise SystemExit(f"no node can have a network here: {reason}")
    network.enter()
    skipped = {name: reason for name in names if (reason := why_not(name, names))}
    names = [name for name in names if name not in skipped]
    if not names:
        raise SystemExit("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    # Told to end (timeout does), it must not leave its cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    needs = {ROWS[name].needs for name in names}
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory("", "tn-", "/tmp", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        net = network.Network(DELAY_MS)
        redis = stack.enter_context(running_redis(folder)) if "redis" in needs else None
        environment = haproxy_environment(folder)
        cluster = RayCluster(folder, environment, WORKER_CPUS, net, redis, is_supervised=True)
        stack.callback(cluster.stop)
        model_set = tiny_set(folder / "set")
        pictures = draw(model_set, 16)
        state = ServeState(cluster)
        cluster.wait_for_head()
        state.replicas()  # the dashboard connects now, to the head
        cluster.clock.write_text("+0s\n")
        for index in range(NUM_WORKERS):
            cluster.add_worker(_clock(cluster.clock) if "clock" in needs and index == 0 else {})
        content = configuration(model_set, cluster.head, config)
        state.deploy(content)
        wait_whole(state, READY_WITHIN_S, "deployed")
        addresses = {f"node{i}": w.url.split("//")[1] for i, w in enumerate(cluster.workers)}
        balancer = Balancer(net.add(), folder, addresses)
        stack.callback(balancer.stop)
        file = json_file or RESULTS / f"network-{config.stem}.json"
        before = json.loads(file.read_text("utf-8")) if file.exists() else {"rows": {}}
        facts = {**describe(), "config": config.name, "skipped": skipped}
        rows: dict[str, Any] = before["rows"]  # of earlier runs, each with its commit
        for name in names:
            scene = Scene(cluster, state, content, cluster.workers[0])
            rows[name] = {**one(ROWS[name], scene, balancer, pictures), "commit": facts["commit"]}
            typer.echo(f"{name}: {rows[name]}", err=True)
            write_result({**facts, "rows": rows}, file)


def one(row: Row, scene: Scene, balancer: Balancer, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Strike under load, and wait until all is as it was."""
    wait_whole(scene.state, RECOVERED_WITHIN_S, f"whole before: {row.told}")
    deadline = time.monotonic() + READY_WITHIN_S
    while not is_ok(f"{balancer.url}/readyz") and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3)  # the balancer's checks see the node again
    workers = scene.cluster.workers
    held = Counter(scene.state.node_of(one.pid).name for one in scene.state.replicas())
    if row.needs != "clock":  # of which one node alone can be set
        scene.victim = max(workers, key=lambda node: held[node.name])
    server = f"node{workers.index(scene.victim)}"
    with CheckedLoad(balancer.url, pictures, BURST, EVERY_S) as load:
        time.sleep(BEFORE_S)
        load.wait_under_way(BURST - 2)
        at = time.monotonic()
        with row.effect(scene):
            time.sleep(row.lasts_s)
            sent, late = balancer.last_sent(server), balancer.num_sent(server, at + LEFT_WITHIN_S)
        ended = time.monotonic()
        recovered = wait_whole(scene.state, RECOVERED_WITHIN_S, row.told, scene.gone)
        time.sleep(AFTER_S)
    told = {
        "row": row.told,
        "lasts_s": row.lasts_s,
        "replicas": dict(held),
        "victim": scene.victim.name,
        **summary(load, at, recovered),
        "recovered_after_end_s": round(recovered - ended, 2),
        "late_for_s": round(_late(load.outcomes, at), 2),
    }
    if not row.is_reached:  # else it is right to send to it
        told["sent_to_it_for_s"] = round(max(0.0, sent - at), 2)
        told["sent_after_3_s"] = late
    return told


def _late(outcomes: Sequence[Outcome], at: float) -> float:
    """Return until when requests were sent that took over 2 s or failed, in s after ``at``."""
    late = [o.sent for o in outcomes if o.ended - o.sent > SLOW_S or o.is_lost]
    return max(late, default=at) - at


if __name__ == "__main__":
    typer.run(main)
