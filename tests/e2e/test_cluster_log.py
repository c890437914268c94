"""A Ray node started as KubeRay starts a pod's: what ``kubectl logs`` would show of it is JSON.

In the fast tier: tests/unit/serve/test_scaling.py has the handlers that Ray makes, and
test_kubernetes.py the pods' environment and the options of ``ray start``.
"""

import json
import tempfile
from pathlib import Path

import httpx
import pytest

from app.launch.config import ServeConfig
from models.manifest import read_manifest
from tests.support.services.live_service import READY_WITHIN_S, ROOT
from tests.support.services.processes import wait_until
from tests.support.services.ray_head import haproxy_environment, ray_head

pytestmark = pytest.mark.slow


@pytest.fixture
def pod(free_port):
    """A head that runs replicas too: one pod for all."""
    with tempfile.TemporaryDirectory("", "tl-", "/tmp", ignore_cleanup_errors=True) as name:
        environment = haproxy_environment(Path(name)) | {
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_LOG_TO_STDERR": "1",
        }
        with ray_head(Path(name), free_port, "--no-redirect-output", **environment) as head:
            yield head


def lines(pod):
    """Return what is JSON of the log so far."""
    whole = pod.log.read_text("utf-8").rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole if line.startswith("{")]


def test_what_a_pods_stages_and_serves_controller_say_is_json(pod, tiny_set, free_port):
    """A start, a replica that dies, the next; what Ray says of itself stays text."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    config = ServeConfig.read(ROOT / "configs" / "cluster-whole.yaml").changed(
        http={"host": "127.0.0.1", "port": port}, model_set=str(tiny_set)
    )
    config = config.changed(streams=1, compile_cache=None, trace_exporter="none")
    content = config.fitted_to(read_manifest(tiny_set)).as_dict()
    (gateway,) = content["applications"][0]["deployments"]
    gateway["ray_actor_options"] = {"num_cpus": 1}
    gateway["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}
    place = f"{pod.dashboard}/api/serve/applications/"  # as KubeRay deploys
    httpx.put(place, json=content, headers=pod.headers, timeout=60).raise_for_status()
    wait_until(lambda: pod.is_ok(f"{url}/readyz"), READY_WITHIN_S, "the service")
    first = pod.replicas()
    for replica in first:
        replica.kill()

    def is_replaced() -> bool:
        return bool(pod.replicas() - first) and pod.is_ok(f"{url}/readyz")

    wait_until(is_replaced, READY_WITHIN_S, "the next replica")
    said = [line for line in lines(pod) if line["message"] == "serving model set tiny, INT8"]
    assert len({line["process"] for line in said}) == len(first) + 1
    assert {line["deployment"] for line in said} == {"tandem_Gateway"}
    (lost,) = (line for line in lines(pod) if "crashed, marking it unhealthy" in line["message"])
    assert (lost["component_name"], lost["levelname"]) == ("controller", "WARNING")
    text = [line for line in pod.log.read_text("utf-8").splitlines() if not line.startswith("{")]
    ours = ("serving model set", "runs on openvino", "no golden answers", "crashed, marking it")
    assert [line for line in text if any(words in line for words in ours)] == []
