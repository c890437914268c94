"""A file that kills the process that decodes it: its call's other files are answered.

``make test`` ends a child process in tests/unit.
"""

import asyncio
import os
import signal

import pytest
from ray import serve
from ray.exceptions import RayActorError

from app.graph.availability import MAX_CALLS
from app.serve.replica import DecoderReplica
from app.serve.set_stages import RemoteDecoder
from app.settings import Settings
from tests.support.services.processes import EVENTUALLY_S
from tests.support.tiny_networks import picture

pytestmark = pytest.mark.slow

DEADLY = picture() + b"deadly"
NUM_GOOD = 7


@pytest.fixture
def decoder(served, tmp_path):  # served has started Serve
    class Fragile(DecoderReplica):  # defined here, so that the replicas need not find this file
        async def decode_many(self, message: bytes) -> bytes:
            if b"deadly" in message:
                (tmp_path / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().decode_many(message)

    deployment = serve.deployment(
        name="Fragile",
        num_replicas=2,
        max_ongoing_requests=1,  # who is by itself in a call is by itself in a process
        ray_actor_options={"num_cpus": 0},
    )(Fragile)
    folder = str(served.model_set)
    settings = Settings(model_set=folder, local_channels=False, trace_exporter="none")
    try:
        yield serve.run(deployment.bind(settings), name="fragile", route_prefix=None)
    finally:
        serve.delete("fragile")


def test_the_other_files_of_its_call_are_answered(decoder, tmp_path, monkeypatch):
    remote, deadly_calls = RemoteDecoder(decoder), []
    call = remote._calls._call

    async def counted(message: bytes) -> bytes:
        if b"deadly" in message:
            deadly_calls.append(message)
        return await call(message)

    monkeypatch.setattr(remote._calls, "_call", counted)
    files = [picture()] * (NUM_GOOD // 2) + [DEADLY] + [picture()] * (NUM_GOOD - NUM_GOOD // 2)

    async def decode_all():
        calls = [remote.decode([file], EVENTUALLY_S, "interactive") for file in files]
        return await asyncio.gather(*calls, return_exceptions=True)

    for file, answer in zip(files, asyncio.run(decode_all()), strict=True):
        if file == DEADLY:
            assert isinstance(answer, RayActorError)
        else:
            assert len(answer.images) == 1, answer
    assert len(deadly_calls) == MAX_CALLS
    # Serve sends a call again by itself if the process dies before it said that it takes it.
    assert len(list(tmp_path.iterdir())) >= MAX_CALLS
