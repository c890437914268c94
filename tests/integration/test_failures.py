"""What goes wrong in a real cluster: deadlines, killed replicas, arguments that nobody knows."""

import os
import signal
from dataclasses import replace

import pytest
from pydantic import ValidationError
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from app.launch.deploy import deploy
from app.main import build
from tests.support.services.deployed import replica_pids
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.tiny_networks import picture

CLASSIFY = "/v1/classify"
TIMEOUTS_S = (1, 3, 9)  # the Gateway is first by a tenth: a busy machine may need more than 0.1 s


def test_a_member_that_hangs_ends_with_the_deadline_as_504(client):
    """In JSON and from the Gateway: Serve has a clock of its own for the header, and says 408."""
    (member,) = replica_pids("unsure")
    os.kill(member, signal.SIGSTOP)
    try:
        for timeout_s in TIMEOUTS_S:
            headers = {"x-request-timeout-seconds": str(timeout_s)}
            answer = client.post(CLASSIFY, content=picture(), headers=headers)
            if answer.status_code == 504:
                break
    finally:
        os.kill(member, signal.SIGCONT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    assert client.post(CLASSIFY, content=picture()).status_code == 200


def test_a_killed_member_comes_back(client):
    (victim,) = replica_pids("sure")
    os.kill(victim, signal.SIGKILL)

    def is_answered_by_another() -> bool:
        answer = client.post(CLASSIFY, content=picture())
        if answer.status_code != 200:
            assert answer.status_code in (503, 504)
            assert answer.json()["error"]["code"] in ("not_ready", "deadline")
        return answer.status_code == 200 and victim not in replica_pids("sure")

    wait_until(is_answered_by_another, EVENTUALLY_S, "a new replica")
    assert client.get("/readyz").status_code == 200


def test_the_typed_builder_refuses_an_argument_it_does_not_know():
    with pytest.raises(ValidationError, match="modelset"):
        call_user_app_builder_with_args_if_necessary(build, {"modelset": "tiny"})  # type: ignore[arg-type]


@pytest.mark.slow  # make test: the builder, above; tests/unit/launch/test_config.py refuses more
def test_an_application_with_a_wrong_argument_fails_and_leaves_the_other_alone(served, client):
    wrong = {
        "name": "wrong",
        "route_prefix": "/wrong",
        "import_path": "app.main:build",
        "args": {"model_set": str(served.model_set), "steams": 1},
    }
    content = served.config.as_dict()
    content["applications"].append(wrong)
    # Not ServeConfig.of, which would refuse it: what Serve's own commands let through.
    deploy(replace(served.config, content=content))

    def has_failed() -> bool:
        status = serve.status().applications.get("wrong")
        return status is not None and status.status == "DEPLOY_FAILED"

    wait_until(has_failed, EVENTUALLY_S, "DEPLOY_FAILED")
    assert "steams" in serve.status().applications["wrong"].message
    assert client.post(CLASSIFY, content=picture()).status_code == 200
    serve.delete("wrong")
