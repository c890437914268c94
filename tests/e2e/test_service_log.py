"""The log of a service without a terminal, as in a container: every line of stderr is JSON."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.services.live_service import Service, Start, changed_config
from tests.support.services.processes import EVENTUALLY_S, replicas, wait_until

Line = dict[str, Any]
REFUSED_WITHIN_S = 60
STARTED = "app='tandem') started successfully on node"  # the controller's words of a replica


def lines_of(service: Service) -> list[Line]:
    """Read all but a last one that is not written to its end; both streams are in the file."""
    whole, _, _ = service.log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture(autouse=True, scope="module")
def _no_format() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TANDEM_LOG_FORMAT")
        yield


def test_every_line_is_json(start_service: Start, photo: bytes, tmp_path: Path) -> None:
    """Start, ready, an error with its request's id, a replica lost and replaced, the end."""
    with changed_config(tmp_path) as content:
        content["logging_config"]["encoding"] = "TEXT"  # JSON is asked of Serve all the same
        args = {"combine": "tests.support.own_functions:vote_on_few"}  # which fails on four
        content["applications"][0]["args"] |= args
    service = start_service("--config", str(tmp_path / "serve_config.yaml"))

    def wait_for(text: str, number: int = 1) -> Line:
        def lines() -> list[Line]:
            return [line for line in lines_of(service) if text in line["message"]]

        wait_until(lambda: len(lines()) >= number, EVENTUALLY_S, text)
        return lines()[number - 1]

    ready = wait_for("ready at")
    assert ready["url"] == service.url
    assert ready["model_set"] == "imagenette"
    wait_for("golden check of resnet50 passed")
    first = wait_for(STARTED)
    assert first["component_name"] == "controller"

    form = [("files", (f"{number}.jpg", photo)) for number in range(4)]
    asked = {"x-request-id": "of-this-test"}
    answer = httpx.post(f"{service.url}/v1/classify", files=form, headers=asked, timeout=60)
    assert answer.status_code == 500
    failed = wait_for("vote_on_few) failed")
    assert "own words" in failed["exc_text"]
    error = wait_for("request of-this-test:")
    assert (error["levelname"], error["request_id"]) == ("ERROR", "of-this-test")
    assert error["deployment"].endswith("Gateway")

    os.kill(replicas(service.process.pid)["Gateway"], signal.SIGKILL)
    assert wait_for("of Ray died")["levelname"] == "WARNING"
    second = wait_for(STARTED, 2)
    assert second["message"] != first["message"]

    assert service.stop() == 0
    lines = lines_of(service)
    assert [line["message"] for line in lines[:1]] == ["starting"]
    assert lines[-1]["message"] == "stopped; nothing of it is left running"
    assert all(line.keys() >= {"asctime", "levelname", "message"} for line in lines)


def test_a_refused_start_is_a_line(start_service: Start) -> None:
    service = start_service("--model-set", "nothing")
    assert service.process.wait(REFUSED_WITHIN_S) == 2
    last = lines_of(service)[-1]
    assert (last["levelname"], last["code"]) == ("ERROR", "model_set")
    assert "'nothing'" in last["message"]
