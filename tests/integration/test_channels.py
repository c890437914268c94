"""Calls of a real application's stages: over sockets on one node, and through Ray without them."""

import asyncio
from pathlib import Path

import pytest
from ray import serve

from app.launch.deploy import deploy
from app.serve.replica import SharedStageReplica
from tests.support.services.deployed import MEMBERS, Served
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.tiny_networks import picture

CONNECTED = "03"  # of a socket, in /proc/net/unix


def connected() -> set[str]:
    """Return the deployments that a Gateway has a channel to."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text("utf-8").splitlines()]
    names = [one[7].split("/") for one in lines if len(one) > 7 and one[5] == CONNECTED]
    return {name[-1] for name in names if name[0] == "@tandem" and name[-2:-1] == ["tandem"]}


def answers(served: Served) -> bool:
    with served.client() as client:
        answer = client.post("/v1/classify", content=picture())
    return answer.status_code == 200 and answer.json()["members"].keys() == MEMBERS.keys()


@pytest.mark.slow  # make test has tests/unit/calls/channels
def test_a_gateway_calls_the_stages_of_its_node_over_sockets(served):
    assert answers(served)
    wait_until(
        lambda: answers(served) and connected() >= {"Decoder", *MEMBERS},
        EVENTUALLY_S,
        "channels to all stages",
    )


@pytest.mark.slow  # make test: test_who_does_not_listen_is_called_through_ray
def test_without_them_calls_go_through_ray(served):
    try:
        deploy(served.config.changed(local_channels=False))
        wait_until(
            lambda: answers(served) and not connected(), EVENTUALLY_S, "an application without"
        )
    finally:
        deploy(served.config)
        wait_until(
            lambda: answers(served) and connected(), EVENTUALLY_S, "the application as it was"
        )


@pytest.mark.slow  # make test has tests/unit/serve/test_replica.py
@pytest.mark.usefixtures("served")  # it has started Serve, at its port
def test_serve_awaits_what_a_replica_does_before_it_ends(tmp_path) -> None:
    """As SharedStageReplica asks for it: by an attribute of the object, not of its class."""
    ended = tmp_path / "ended"

    class Ending:  # defined here, so that the replica need not find this file
        def __init__(self) -> None:
            self.__del__ = self._drain

        async def _drain(self) -> None:
            await asyncio.sleep(0.2)
            ended.touch()

    deployment = serve.deployment(name="Ending", ray_actor_options={"num_cpus": 0})(Ending)
    serve.run(deployment.bind(), name="ending", route_prefix=None)
    serve.delete("ending")
    wait_until(ended.exists, EVENTUALLY_S, "the replica's last act")
    assert "__del__" not in vars(SharedStageReplica)
