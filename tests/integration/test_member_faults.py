"""A member that hangs, fails or is gone: who answers meanwhile, and that it is replaced."""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import RayTaskError

from app.launch.deploy import deploy
from app.settings import Settings
from app.stages.classifier import Classifier
from tests.support.services.deployed import replica_pids
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.tiny_networks import SIZE, picture, write_tiny_set

CLASSIFY = "/v1/classify"
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no replica can import a test


class Breakable(Classifier):
    """A member whose network fails as long as a file lies in its model set's folder."""

    def __init__(self, settings: Settings, member: str) -> None:
        super().__init__(settings, member)
        self._broken = Path(settings.model_set) / "broken"

    def _run(self, batch):
        if self._broken.exists():
            raise RuntimeError("no memory")
        return self._network.predict(batch)

    async def _infer(self, batch):
        with self._health.run():
            return await self._inference_threads.run(self._run, batch)

    async def answer(self, images):
        return await self.classify(images, 10.0)

    async def pid(self) -> int:
        return os.getpid()


def test_a_replica_whose_inference_fails_is_replaced(served, tmp_path):
    folder = write_tiny_set(tmp_path / "tiny")
    settings = Settings(model_set=str(folder), batch_sizes=(1,), streams=1, compile_cache=None)
    member = serve.deployment(
        name="breakable", health_check_period_s=0.5, ray_actor_options={"num_cpus": 0.1}
    )(Breakable)
    handle = serve.run(member.bind(settings, "sure"), name="breakable", route_prefix=None)
    try:
        images = np.zeros((1, SIZE, SIZE, 3), np.uint8)
        first = handle.pid.remote().result()
        (folder / "broken").touch()
        for _ in range(3):
            with pytest.raises(RayTaskError, match="no memory"):
                handle.answer.remote(images).result()
        (folder / "broken").unlink()

        def is_replaced() -> bool:
            return handle.pid.remote().result() != first

        wait_until(is_replaced, EVENTUALLY_S, "a new replica")
        assert handle.answer.remote(images).result().probabilities.shape == (1, 3)
    finally:
        serve.delete("breakable")


@pytest.fixture
def content_with_less(served):
    """Let the running application be content with any member, for a test."""
    deploy(served.config.changed(answer_policy="any", member_patience_s=1.0))
    wait_until(is_running, EVENTUALLY_S, "the policy")
    yield
    deploy(served.config)
    wait_until(is_running, EVENTUALLY_S, "the policy of before")


def is_running() -> bool:
    """Whether every replica has the configuration that was deployed last."""
    status = serve.status().applications["tandem"]
    return status.status == "RUNNING" and all(
        set(deployment.replica_states) == {"RUNNING"} for deployment in status.deployments.values()
    )


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow  # make test has tests/unit/graph/test_members.py
def test_any_member_is_enough_if_the_policy_says_so(content_with_less, client):
    whole = client.post(CLASSIFY, content=picture("red")).json()
    assert (whole["degraded"], set(whole["members"])) == (False, {"sure", "unsure"})
    (member,) = replica_pids("unsure")
    with stopped(member):
        answers = [client.post(CLASSIFY, content=picture("red")) for _ in range(4)]
    for answer in answers:
        assert answer.status_code == 200
        told = answer.json()
        assert (told["degraded"], set(told["members"])) == (True, {"sure"})
        assert told["predictions"][0]["label"] == "mostly red"
    why = [answer.json()["missing_members"]["unsure"] for answer in answers]
    assert why[0] == "late"
    assert "not_asked" in why[1:]  # the next ones do not wait for it

    def is_whole_again() -> bool:
        return not client.post(CLASSIFY, content=picture("red")).json()["degraded"]

    wait_until(is_whole_again, EVENTUALLY_S, "whole again")
