"""Real services with a Ray in which private names have other names: they warn, and classify.

In the fast tier tests/unit/serve/test_ray_compatibility.py and
tests/unit/launch/test_ray_features.py take each name away by itself, without a cluster.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
import ray

from app.launch.ray_features import CONTROLLER, DEPLOY, FORKS, LOG_MONITOR, ONE_MACHINE
from app.serve.ray_compatibility import GRPC_OPTIONS, STAGE_ROUTER
from tests.support.cases import cases
from tests.support.services.live_service import Service, changed_config
from tests.support.tiny_networks import picture, write_tiny_set

SUFFIX = "_of_another_version"


def renamed_ray(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Make the copy in ``folder``; return the environment with which Python imports it."""
    installed = Path(ray.__file__).parent
    copy = folder / "ray"
    shutil.copytree(installed, copy, copy_function=_linked, symlinks=True)
    word = re.compile(rf"\b({'|'.join(names)})\b")
    for path in copy.rglob("*.py"):
        text = path.read_text("utf-8")
        renamed = word.sub(rf"\1{SUFFIX}", text)
        if renamed != text:
            path.unlink()  # the installed one has the same inode
            path.write_text(renamed, "utf-8")
    return {"PYTHONPATH": str(folder)}


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


pytestmark = pytest.mark.slow
# One name that nothing else has, of each feature.
NAMES = {
    FORKS: "_build_python_executable_command_memory_profileable",
    ONE_MACHINE: "start_api_server",
    LOG_MONITOR: "start_log_monitor",
    CONTROLLER: "get_serve_instance_details",
    GRPC_OPTIONS: "DEFAULT_GRPC_SERVER_OPTIONS",
    STAGE_ROUTER: "on_new_queue_len_info",
}
# Two at a time, of which neither needs the other: a start takes most of a test's time. Unit tests
# take each away by itself.
OF_LAUNCH = ((FORKS, LOG_MONITOR), (ONE_MACHINE, CONTROLLER))


@pytest.fixture
def config(tmp_path):
    """A service of tiny networks, the members deployments of their own."""
    write_tiny_set(tmp_path / "tiny")
    with changed_config(tmp_path) as content:
        (application,) = content["applications"]
        application["args"] |= {
            "model_set": str(tmp_path / "tiny"),
            "members": "deployment",
            "allow_unverified": True,
            "trace_exporter": "none",
        }
        application["deployments"] += [
            {
                "name": name,
                "graceful_shutdown_timeout_s": 12,
                "ray_actor_options": {"num_cpus": 0.1},
            }
            for name in ("sure", "unsure")
        ]
    return tmp_path / "serve_config.yaml"


def serve(monkeypatch, folder, config, port, *names):
    for variable, value in renamed_ray(folder / "lib", names).items():
        monkeypatch.setenv(variable, value)
    return Service(port, "--config", str(config), log=folder / "log.txt")


@cases(
    "features",
    *(pytest.param(both, id=" and ".join(f.name for f in both)) for both in OF_LAUNCH),
    pytest.param(tuple(NAMES), id="all"),
)
def test_what_leans_on_a_renamed_name_is_left_out(
    monkeypatch, tmp_path, config, free_port, features
):
    names = [NAMES[feature] for feature in features]
    service = serve(monkeypatch, tmp_path, config, free_port(), *names)
    try:
        service.wait_ready()
        answer = httpx.post(f"{service.url}/v1/classify", content=picture("red"), timeout=60)
        assert answer.json()["predictions"][0]["label"] == "mostly red"
    finally:
        code = service.stop()
    assert code == 0
    said = " ".join(service.log.read_text().split())
    for feature, name in zip(features, names, strict=True):
        assert said.count(f"{name} is not there. Left out: {feature.name}") == 1
    of_an_older_ray = said.count("max_surge_percent is not there")
    assert said.count("Left out:") == len(features) + of_an_older_ray


def test_without_a_way_to_deploy_nothing_starts(monkeypatch, tmp_path, config, free_port):
    (name, *_) = (name.name for name in DEPLOY.names)
    service = serve(monkeypatch, tmp_path, config, free_port(), name)
    assert service.process.wait(60) != 0
    said = service.log.read_text()
    assert f"{name} is not there" in said
    assert "pip install 'ray[serve]==" in said
    assert "Traceback" not in said
