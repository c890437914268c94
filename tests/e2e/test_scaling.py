"""A step of load on a cluster's configuration: all stages grow together, and shrink without a loss.

The tiny networks cost next to nothing, so the policy is told what they cost: what is measured
counts only when a replica is busy.

In the fast tier: the policy alone in tests/unit/scaling, and the same step within 15 s against
simulated replicas in tests/unit/calibration/test_planning_simulation.py.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from app.bench.load import Target, open_loop, poisson_arrivals
from app.bench.measurement import TimedRequest
from models.machine import available_cpus
from tests.support.services.live_service import Service, changed_config
from tests.support.services.processes import descendants, serve_logs, title, wait_until
from tests.support.tiny_networks import picture, write_tiny_set

pytestmark = pytest.mark.slow
# By configuration and stage; a whole graph computes on all cores. One replica carries 12 images/s
# of the step's 20, and all of the 3 that are there after it.
CPU_MS = {
    "cluster.yaml": {"Gateway": 20.0, "Decoder": 40.0, "sure": 20.0, "unsure": 20.0},
    "cluster-whole.yaml": {"Gateway": 20.0 * available_cpus()},
}
TARGET_UTILIZATION = 0.25
REACTS_WITHIN_S = 15.0  # to a step: the promise
STEP_S, TRICKLE_S = 45.0, 45.0
STARTS_WITHIN_S = STEP_S - REACTS_WITHIN_S  # after the step is too late


@dataclass(frozen=True)
class Scaling:
    """A service, and the stages that it scales."""

    service: Service
    stages: Collection[str]

    def num_replicas(self) -> dict[str, int]:
        """Count each stage's processes, those that are still starting included."""
        names = [title(process) for process in descendants(self.service.process.pid)]
        found = [n.partition(":tandem:")[2].strip() for n in names if n.startswith("ray::ServeRep")]
        return {stage: sum(name.startswith(stage) for name in found) for stage in self.stages}

    def has_decided(self, change: str) -> bool:
        """Whether the policy told a change of every stage in the controller's log."""
        logs = serve_logs(self.service.process.pid).glob("controller_*.log")
        text = "".join(log.read_text("utf-8") for log in logs)
        return all(f"{stage}: {change} replicas" in text for stage in self.stages)


@pytest.fixture(scope="module", params=CPU_MS)
def scaling(request, start_service, tmp_path_factory) -> Iterator[Scaling]:
    """The cluster's configuration on this machine, with limits that fit it."""
    cpu_ms = CPU_MS[request.param]
    folder = tmp_path_factory.mktemp("scaling")
    write_tiny_set(folder / "tiny", gains={"sure": 8.0, "unsure": 2.0})
    with changed_config(folder, f"configs/{request.param}") as content:
        application = content["applications"][0]
        application["args"] |= {"compile_cache": None, "trace_exporter": "none"}
        application["autoscaling_policy"]["policy_kwargs"] = {
            "target_utilization": TARGET_UTILIZATION,
            "scale_down_after_s": 4,
            "cpu_ms": cpu_ms,
        }
        for deployment in application["deployments"]:
            deployment["ray_actor_options"] = {"num_cpus": 0.2}
            deployment["graceful_shutdown_timeout_s"] = 10
            del deployment["max_replicas_per_node"]  # there is one
            deployment["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 2}
    files = ("--config", str(folder / request.param), "--model-set", str(folder / "tiny"))
    service = start_service(*files, "--host", "127.0.0.1")
    yield Scaling(service, cpu_ms.keys())
    service.stop()


def load(service: Service) -> list[TimedRequest]:
    """Send the step, and then a few images while the replicas that are too many end."""
    samples: list[TimedRequest] = []
    step = poisson_arrivals(20, STEP_S, seed=1).tolist()
    after = [STEP_S + at for at in poisson_arrivals(3, TRICKLE_S, seed=2)]
    asyncio.run(open_loop(Target(service.url, [picture("green")]), step + after, samples.append))
    return samples


def test_all_stages_grow_together_within_15_s_and_shrink_without_a_lost_request(scaling):
    assert scaling.num_replicas() == dict.fromkeys(scaling.stages, 1)
    with ThreadPoolExecutor(1) as pool:
        began, sent = time.monotonic(), pool.submit(load, scaling.service)
        wait_until(lambda: scaling.has_decided("1 -> 2"), REACTS_WITHIN_S, "a decision")
        print(f"decided {time.monotonic() - began:.1f} s after the step")
        wait_until(
            lambda: scaling.num_replicas() == dict.fromkeys(scaling.stages, 2),
            STARTS_WITHIN_S,
            "growth",
        )
        print(f"all replicas starting {time.monotonic() - began:.1f} s after the step")
        wait_until(
            lambda: scaling.num_replicas() == dict.fromkeys(scaling.stages, 1),
            STEP_S + TRICKLE_S,
            "shrinking",
        )
        print(f"all stages shrank {time.monotonic() - began - STEP_S:.1f} s after its end")
        assert not sent.done()  # images came while they shrank
        samples = sent.result()
    assert len(samples) > 350
    assert Counter(sample.error for sample in samples) == {None: len(samples)}
