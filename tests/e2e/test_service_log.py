"""The log of a service without a terminal, as in a container: every line of stderr is JSON."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.services.live_service import ROOT, Service, changed_config
from tests.support.services.processes import EVENTUALLY_S, raylet, replicas, wait_until
from tests.support.spoilt_golden import both_precisions, spoil_int8
from tests.support.tiny_networks import write_tiny_set

Line = dict[str, Any]
DEPLOY = """
import sys
import ray
from pathlib import Path
from app.launch.config import ServeConfig
from app.launch.deploy import deploy
from models.manifest import read_manifest
address, folder = sys.argv[1:]
ray.init(address=address, namespace="serve", log_to_driver=False)
config = ServeConfig.read(Path("serve_config.yaml")).changed(model_set=folder)
deploy(config.fitted_to(read_manifest(Path(folder))))
"""
STARTED = "app='tandem') started successfully on node"  # the controller's words of a replica


def lines_of(service: Service) -> list[Line]:
    """Read all but a last one that is not written to its end; both streams are in the file."""
    whole, _, _ = service.log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture(autouse=True, scope="module")
def _no_format():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TANDEM_LOG_FORMAT")
        yield


@pytest.mark.slow  # make test formats lines in tests/unit/compute and launch
def test_every_line_is_json(start_service, photo, tmp_path):
    """Start, ready, an error with its request's id, a replica lost and replaced, the end."""
    with changed_config(tmp_path) as content:
        content["logging_config"]["encoding"] = "TEXT"  # JSON is asked of Serve all the same
        args = {"combine": "tests.support.own_functions:vote_on_few"}  # which fails on four
        content["applications"][0]["args"] |= args
    config = str(tmp_path / "serve_config.yaml")
    service = start_service("--log-level", "debug", "--config", config)

    def wait_for(text: str, number: int = 1) -> Line:
        def lines() -> list[Line]:
            return [line for line in lines_of(service) if text in line["message"]]

        wait_until(lambda: len(lines()) >= number, EVENTUALLY_S, text)
        return lines()[number - 1]

    ready = wait_for("ready at")
    assert (ready["url"], ready["model_set"]) == (service.url, "imagenette")
    wait_for("golden check of resnet50 passed")
    first = wait_for(STARTED)
    assert first["component_name"] == "controller"

    form = [("files", (f"{number}.jpg", photo)) for number in range(4)]
    asked = {"x-request-id": "of-this-test"}
    answer = httpx.post(f"{service.url}/v1/classify", files=form, headers=asked, timeout=60)
    assert answer.status_code == 500
    assert "own words" in wait_for("vote_on_few) failed")["exc_text"]
    error = wait_for("request of-this-test:")
    assert (error["levelname"], error["request_id"]) == ("ERROR", "of-this-test")
    assert error["deployment"].endswith("Gateway")

    os.kill(replicas(service.process.pid)["Gateway"], signal.SIGKILL)
    assert wait_for("; Serve starts another one")["levelname"] == "WARNING"
    assert wait_for(STARTED, 2)["message"] != first["message"]

    assert service.stop() == 0
    lines = lines_of(service)
    assert [line["message"] for line in lines[:1]] == ["starting"]
    assert lines[-1]["message"] == "stopped; nothing of it is left running"
    assert all(line.keys() >= {"asctime", "levelname", "message"} for line in lines)


@pytest.mark.slow  # as above
def test_a_set_that_changes_is_a_line(start_service, tmp_path, monkeypatch):
    """The first one is served as FP16, since this CPU computes its INT8 otherwise."""
    first, second = both_precisions(tmp_path / "first"), write_tiny_set(tmp_path / "second")
    spoil_int8(first, "unsure")
    monkeypatch.setenv("TANDEM_PRECISION", "auto")
    service = start_service("--model-set", str(first), "--log-level", "debug")

    def said(text: str) -> list[Line]:
        return [line for line in lines_of(service) if text in line["message"]]

    (warning,) = said("precision auto: FP16 is served, not INT8: unsure INT8 does not answer")
    assert warning["levelname"] == "WARNING"
    served = httpx.get(f"{service.url}/v1/models", timeout=60).json()
    assert [member["precision"] for member in served["members"]] == ["FP16", "FP16"]
    wait_until(lambda: said("serving model set tiny, FP16"), EVENTUALLY_S, "the first set's line")

    ray = raylet(service.process.pid)
    (address,) = (w for w in ray.cmdline() if w.startswith("--gcs-address="))
    subprocess.run(
        [sys.executable, "-c", DEPLOY, address.partition("=")[2], str(second)],
        env=ray.environ(),  # Serve's variables, and where Ray's token is
        cwd=ROOT,
        check=True,
    )
    wait_until(lambda: said("serving model set tiny, INT8"), EVENTUALLY_S, "the second set's line")
    (changed,) = said("serving model set tiny, INT8")
    assert changed["deployment"].endswith("Gateway")
    assert said("Deploying new version of Deployment(name='Gateway', app='tandem')")
    assert service.stop() == 0


@pytest.mark.slow  # as above
def test_a_start_is_twelve_lines_at_most(start_service):
    service = start_service()
    lines = lines_of(service)
    assert lines[0]["message"] == "starting"
    assert any(Path(lines[0]["logs_of_ray"]).glob("serve/*.log"))
    assert len(lines) <= 12, [line["message"] for line in lines]


def test_a_refused_start_is_a_line(start_service):
    service = start_service("--model-set", "nothing", is_awaited=False)
    assert service.process.wait(EVENTUALLY_S) == 2
    last = lines_of(service)[-1]
    assert (last["levelname"], last["code"]) == ("ERROR", "model_set")
    assert "'nothing'" in last["message"]
