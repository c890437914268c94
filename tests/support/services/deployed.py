"""The running application as the tests see it: its address, and its replicas' processes."""

import os
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from app.launch.config import ServeConfig

MEMBERS = {"sure": 8.0, "unsure": 2.0}  # and how sure they are
MAX_BATCH_SIZE = 6  # by user_config; 8 is the largest that is compiled


@dataclass(frozen=True)
class Served:
    """The running application."""

    url: str
    config: ServeConfig
    model_set: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)


def own_application(name, folder, deployments, **args):
    """Return an application at a route of its name, with another model set."""
    quiet = {"compile_cache": None, "trace_exporter": "none"}
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "app.main:build",
        "args": {"model_set": str(folder), **quiet, **args},
        "deployments": deployments,
    }


def replica_pids(deployment: str) -> set[int]:
    """Return the processes of a deployment's replicas, among those that this session started."""
    title = f"ServeReplica:tandem:{deployment}"
    return {p.pid for p in psutil.Process(os.getpid()).children(recursive=True) if is_one(p, title)}


def is_one(process: psutil.Process, title: str) -> bool:
    try:
        return title in " ".join(process.cmdline())
    except psutil.Error:  # it ended while we looked
        return False
