"""What metrics cost an image, in CPU time: ``python tests/load/metrics.py``.

A replica records images without classifying any, as fast as it can; then Ray's export of them is
waited for, since it costs too: in the replica's process and in Ray's agent, which takes a
histogram's values one by one. Prints JSON; ``--json FILE`` writes it as well.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import typer
from machine import describe
from ray import serve
from result_file import write_result

from app.metrics.member import MemberMetrics
from app.metrics.replica import start_metrics
from app.metrics.requests import observe_stages, record_answered, record_answers, stage_tags
from app.queueing.batch_records import ExecutedBatch, QueueReport
from app.responses import Classified, MemberOpinion, Prediction, StageTiming, Timings

MEMBERS = ("resnet50", "densenet169")
EXPORTED_AFTER_S = 12.0  # Ray tells what it has every ten seconds
AGENT = "ray::DashboardAgent"


@serve.deployment
class Recorder:
    """Records an image as the service does for one photo in a batch of one."""

    async def record(self, num_images: int) -> dict[str, float]:
        """Record images; return the seconds and the process's CPU seconds that it took."""
        start_metrics()
        members = [MemberMetrics(name, lambda: QueueReport(0, 0.0, 1, 1, 1.0)) for name in MEMBERS]
        answer = _answer()
        started, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(num_images):
            record_answers([answer], 0.1, [])
            observe_stages([(stage_tags("encode", None), 0.05)])
            record_answered("/v1/classify", 200, 40.0)
            for member in members:
                member.executed(ExecutedBatch(0.0, 0.02, (0,)))
        return {"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s}

    async def cpu_s(self) -> float:
        """Return the process's CPU time so far."""
        return time.process_time()


def _answer() -> Classified:
    row = Prediction(index=0, label="x", probability=0.9)
    opinion = MemberOpinion(label="x", probability=0.9, predictions=[row])
    own = [(name, MEMBERS[i]) for i in range(len(MEMBERS)) for name in ("queue", "infer")]
    stages = [("read", None), ("decode", None), *own, ("combine", None)]
    spans = [StageTiming(stage=name, member=m, start_ms=0, duration_ms=7) for name, m in stages]
    return Classified(
        model_set="fake",
        model_version="0123456789ab",
        predictions=[row],
        members=dict.fromkeys(MEMBERS, opinion),
        agreement=True,
        degraded=False,
        request_id="1",
        timings_ms=Timings(total=10, stages=spans),
    )


def _agent_cpu_s() -> float:
    for process in psutil.Process(os.getpid()).children(recursive=True):
        if AGENT in " ".join(process.cmdline()):
            times = process.cpu_times()
            return times.user + times.system
    raise SystemExit(f"no {AGENT}: is this Ray's version?")


async def _measure(handle: Any, num_images: int) -> dict[str, Any]:
    off = await _over(handle, EXPORTED_AFTER_S)
    await handle.record.remote(1)
    rest = await _over(handle, EXPORTED_AFTER_S)
    before = _agent_cpu_s(), await handle.cpu_s.remote()
    taken = await handle.record.remote(num_images)
    await asyncio.sleep(EXPORTED_AFTER_S)
    agent_s = _agent_cpu_s() - before[0] - rest[0]
    replica_s = await handle.cpu_s.remote() - before[1] - rest[1]
    return {
        "on_the_request_us": round(taken["s"] / num_images * 1e6, 1),
        "replica_cpu_us": round(replica_s / num_images * 1e6, 1),
        "agent_cpu_us": round(agent_s / num_images * 1e6, 1),
        "at_rest_cores": _cores(rest),
        "at_rest_cores_without": _cores(off),
    }


def _cores(cpu_s: tuple[float, float]) -> dict[str, float]:
    agent, replica = (round(seconds / EXPORTED_AFTER_S, 4) for seconds in cpu_s)
    return {"agent": agent, "replica": replica}


async def _over(handle: Any, seconds: float) -> tuple[float, float]:
    before = _agent_cpu_s(), await handle.cpu_s.remote()
    await asyncio.sleep(seconds)
    return _agent_cpu_s() - before[0], await handle.cpu_s.remote() - before[1]


def main(
    num_images: Annotated[int, typer.Option(min=1)] = 5000,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Record images in a replica of a Ray of our own."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    handle = serve.run(Recorder.bind(), name="metrics", route_prefix=None)
    result = {**describe(), "num_images": num_images, **asyncio.run(_measure(handle, num_images))}
    serve.shutdown()
    ray.shutdown()
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
