"""The graph on a real Ray Serve and a real OpenVINO, with networks that tests can foretell.

One cluster and one application for all tests, in Serve's default mode (its environment is read when
ray is imported); the fast mode, HAProxy and the bundled networks are e2e's.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from ray import serve

from app.launch.config import ServeConfig
from app.launch.deploy import client_of, deploy, wait_ready
from app.launch.ray_cluster import StopRequest
from models.manifest import read_manifest
from tests.support.configurations import with_deployment
from tests.support.services.deployed import MAX_BATCH_SIZE, MEMBERS, Served
from tests.support.tiny_networks import write_tiny_set
from tests.support.trace_receivers import OtlpHttp

ROOT = Path(__file__).parents[2]
_running = ExitStack()
NUM_CONVOLUTIONS = 24  # makes one image take some 10 ms: others arrive meanwhile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that need no Ray: beside these tests/e2e starts its service."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    others = [item for item in items if item not in own]
    with_ray = {item.path for item in own if "cluster" in getattr(item, "fixturenames", ())}
    items[:] = sorted(own, key=lambda item: item.path in with_ray) + others


@pytest.fixture(scope="session")
def cluster(spans):
    """Start a Ray of our own: ``address="local"`` never joins one that is already there."""
    with pytest.MonkeyPatch.context() as patch:  # for Ray's processes, and no later test's
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        ray.init(
            address="local",
            namespace="serve",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
        )
    _running.callback(ray.shutdown)
    _running.callback(serve.shutdown)
    yield
    _running.close()


@pytest.hookimpl(trylast=True)  # after the fixtures that need the cluster
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the cluster after the last test of this folder: at rest it still costs CPU time."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _running.close()


@pytest.fixture(scope="session")
def spans():
    """Where the application's traces go."""
    with OtlpHttp() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def served(cluster, spans, tmp_path_factory, free_port) -> Served:
    """Deploy configs/separate.yaml, where no stage shares a process, with another model set."""
    folder = write_tiny_set(
        tmp_path_factory.mktemp("sets") / "tiny",
        gains=MEMBERS,
        weights={"sure": 3.0, "unsure": 1.0},
        size=64,
        num_convolutions=NUM_CONVOLUTIONS,
    )
    config = ServeConfig.read(ROOT / "configs" / "separate.yaml").changed(
        http={"port": free_port()}, grpc_port=free_port(), model_set=str(folder)
    )
    config = config.changed(streams=1, compile_cache=None, max_files=8)
    config = config.changed(trace_endpoint=spans.url)
    config = config.fitted_to(read_manifest(folder))
    for deployment in config.deployments:
        options = {**deployment, "health_check_period_s": 1}
        if deployment["name"] in MEMBERS:
            options["user_config"] = {"max_batch_size": MAX_BATCH_SIZE}
        config = with_deployment(config, options)
    deploy(config)
    with client_of(config.url) as client:
        assert wait_ready(client, StopRequest(), lambda _: None, 120, applications=["tandem"])
    return Served(config.url, config, folder)


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client
