"""What Serve tells of its replicas and proxies through Ray's dashboard, and where they run."""

from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from ray_nodes import RayCluster, RayNode, is_ok

APPLICATION = "tandem"


@dataclass(frozen=True)
class Replica:
    deployment: str
    pid: int


class ServeState:
    """The application on a cluster; every question asks anew."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._url = f"{cluster.dashboard}/api/serve/applications/"

    def deploy(self, config: dict[str, Any]) -> None:
        """Hand over the configuration, as ``serve deploy`` and KubeRay do."""
        headers = self._cluster.headers
        answer = httpx.put(self._url, json=config, headers=headers, timeout=180, trust_env=False)
        if answer.is_error:
            raise SystemExit(f"not deployed: {answer.status_code} {answer.text}")

    def replicas(self) -> list[Replica]:
        """Return the replicas that run; none while nobody tells."""
        return self._running(self._deployments())

    def is_whole(self) -> bool:
        """Return whether all replicas run, and the ingress of their nodes and the head answers."""
        deployments = self._deployments()
        wanted = sum(one["target_num_replicas"] for one in deployments.values())
        running = [one for one in self._running(deployments) if psutil.pid_exists(one.pid)]
        healthy = all(one["status"] == "HEALTHY" for one in deployments.values())
        # Serve gives no other node one: a node that came back waits for a replica.
        pids = {one.pid for one in running}
        holding = (
            node
            for node in self._cluster.nodes
            if node is self._cluster.head or pids & {one.pid for one in node.processes()}
        )
        return healthy and 0 < wanted == len(running) and all(map(answers, holding))

    def told(self) -> str:
        """Return the application as Serve tells of it, to be read when something goes wrong."""
        application = self._application()
        deployments = "; ".join(
            f"{name} {one['status']} {[replica['state'] for replica in one['replicas']]}"
            f" {one['message']}"
            for name, one in application.get("deployments", {}).items()
        )
        silent = [node.name for node in self._cluster.nodes if not answers(node)]
        return (
            f"{application.get('status')} {application.get('message')} {deployments};"
            f" nodes whose HAProxy does not answer: {silent}"
        )

    def node_of(self, pid: int) -> RayNode:
        for node in self._cluster.nodes:
            if any(process.pid == pid for process in node.processes()):
                return node
        raise SystemExit(f"process {pid} runs on no node of the cluster")

    def _deployments(self) -> dict[str, Any]:
        found: dict[str, Any] = self._application().get("deployments", {})
        return found

    def _application(self) -> dict[str, Any]:
        try:
            headers = self._cluster.headers
            answer = httpx.get(self._url, headers=headers, timeout=10, trust_env=False)
        except httpx.HTTPError:
            return {}
        if answer.status_code != 200:
            return {}
        applications = answer.json()["applications"]
        found: dict[str, Any] = applications.get(APPLICATION, {})
        return found

    @staticmethod
    def _running(deployments: dict[str, Any]) -> list[Replica]:
        return [
            Replica(name, replica["pid"])
            for name, one in deployments.items()
            for replica in one["replicas"]
            if replica["state"] == "RUNNING"
        ]


def answers(node: RayNode) -> bool:
    """Return whether the node's HAProxy is there and has a Gateway to send to."""
    return is_ok(f"{node.url}/healthz")


def titled(node: RayNode, words: str) -> list[psutil.Process]:
    """Return the node's processes whose command line has these words."""
    found = []
    for process in node.processes():
        try:
            if words in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it ended while we looked
            continue
    return found
