"""Measures, in a process of its own, what loading a set takes and unloading it gives back.

Prints JSON: the process's PSS in MB (its own memory, and its part of what it shares) while the set
is loaded, and when it has been unloaded, each time.
"""

import asyncio
import json
import sys

import psutil

from app.graph.request import ClassifyRequest
from app.serve.gateway import assemble
from app.settings import Settings
from app.telemetry.metrics import RequestObserver
from tests.support.tiny_networks import picture

TIMES = 2


def pss_mb() -> float:
    return float(psutil.Process().memory_full_info().pss) / 1e6


async def measured(default: str, other: str) -> dict[str, list[float]]:
    settings = Settings(
        model_sets=(default, other), batch_sizes=(1,), compile_cache=None, unload_after_s=1e-9
    )
    graph = assemble(settings)
    service = graph.service.sets[other]
    pss: dict[str, list[float]] = {"loaded": [], "unloaded": []}
    for _ in range(TIMES):
        # Several at once: each inference thread has an infer request of its own.
        await asyncio.gather(*(service.classify(request()) for _ in range(4)))
        pss["loaded"].append(round(pss_mb(), 1))
        await graph.check_health()
        await vars(service._graph)["_unloading"]
        pss["unloaded"].append(round(pss_mb(), 1))
    return pss


def request() -> ClassifyRequest:
    return ClassifyRequest([picture("red")], 1, 60.0, "id", RequestObserver())


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(*sys.argv[1:]))))
