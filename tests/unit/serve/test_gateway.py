"""The Gateway's graph, and whether an answer is sure over every interface."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest

from app.answers import Combined
from app.environment import MIB
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.http.api import create_api
from app.serve.gateway import Gateway, assemble
from app.settings import Settings
from models.ensemble import AnswerRule
from models.manifest import SureRecord
from tandem_client.answers import classification_of
from tandem_client.exchange import Options
from tandem_client.grpc_client import _outcomes
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, handle_of
from tests.support.grpc_contexts import context_of, stalled_stream, stream_of
from tests.support.open_inference import images
from tests.support.steps import settle
from tests.support.tiny_networks import picture, write_tiny_set

# Clients' libraries, and those of commands and stores: imported where they are used.
NOT_FOR_SERVING = ("httpx", "rich", "pygments", "smart_open", "fsspec", "matplotlib", "scipy")
SCRIPT = f"""
import sys
import app.serve.gateway, app.main
print([name for name in {NOT_FOR_SERVING} if name in sys.modules])
"""


def test_a_gateway_imports_nothing_that_only_others_use() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


async def test_large_messages_of_both_interfaces_share_one_room(tiny_set: Path) -> None:
    settings = Settings(
        model_set=str(tiny_set), max_body_bytes=4 * MIB, max_bytes_in_flight=16 * MIB
    )
    stages = FakeDecoder(), FakeMember(), FakeCombiner()
    decoder, member, combiner = map(handle_of, stages)
    gateway = Gateway(settings, decoder, {"sure": member}, combiner)
    announced = {"x_grpc_message_prefix": f"00{3 * MIB:08x}"}
    calls = [
        gateway.Classify(stalled_stream(), context_of(**announced)),
        gateway._open_inference.call("ModelInfer", stalled_stream(), context_of(**announced)),
        gateway.Check(stalled_stream(), context_of()),  # needs no key, and takes no room of theirs
    ]
    tasks = [asyncio.create_task(call) for call in calls]
    await settle()
    assert gateway._grpc._receiver._room.num_taken == 6 * MIB
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Whether an answer is sure: the same over every interface, from the cache too.


BOUND = 0.9  # a red picture's first class has more; a grey one's has a third
SURE = SureRecord(
    probability=BOUND, target=0.9, num_images=9, share=0.5, right=1, right_interval=(0.7, 1)
)
RED = picture("red", side=30)
GREY = cv2.imencode(".png", np.full((30, 30, 3), 90, np.uint8))[1].tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gains = {"sure": 8.0, "unsure": 4.0}
    return write_tiny_set(tmp_path_factory.mktemp("set") / "tiny", gains=gains, sure=SURE)


def served(folder: Path, **more: object) -> tuple[Any, httpx.AsyncClient]:
    """Return a service and a client of it."""
    service = assemble(Settings(model_set=str(folder), compile_cache=None, **more)).service
    transport = httpx.ASGITransport(create_api(service))
    return service, httpx.AsyncClient(transport=transport, base_url="http://tandem")


async def by_grpc(service: Any, *files: bytes) -> Any:
    incoming = stream_of(ClassifyRequest(images=files).SerializeToString())
    return await GrpcInterface(service).classify(incoming, context_of())


async def sure_of(client: httpx.AsyncClient, data: bytes) -> object:
    told = (await client.post("/v1/classify", content=data)).json()
    assert classification_of(told).sure is told.get("sure")
    return told.get("sure")


async def infer(client: httpx.AsyncClient, model: str, *files: bytes) -> dict[str, object]:
    body, headers = images(*files)
    answer = await client.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    return dict(answer.json().get("parameters", {}))


@pytest.mark.parametrize("cache", ["none", "local"])
async def test_every_interface_says_it(folder: Path, cache: str) -> None:
    service, client = served(folder, cache=cache)
    for _ in range(2):  # the second from the cache, if there is one
        assert [await sure_of(client, RED), await sure_of(client, GREY)] == [True, False]
    told = (await client.get("/v1/models")).json()
    assert told["sure"]["probability"] == BOUND
    assert (await infer(client, "tiny", RED))["sure"] is True
    assert (await infer(client, "tiny", RED, GREY))["sure"] is False  # all must be
    assert "sure" not in await infer(client, "tiny.sure", RED)
    reply = await by_grpc(service, RED, GREY)
    assert [one.classified.sure for one in reply.results] == [True, False]
    assert [one.sure for one in _outcomes(reply, 2, Options("grpc://x"))] == [True, False]


@pytest.mark.parametrize("cache", ["none", "local"])
async def test_an_answer_of_some_members_does_not_say(folder: Path, cache: str) -> None:
    """The bound was measured on the average of all."""
    _, client = served(folder, cache=cache, cascade_margin=0.5)
    for _ in range(2):
        told = (await client.post("/v1/classify", content=RED)).json()
        assert (told["skipped_members"], told.get("sure")) == (["unsure"], None)
    assert await sure_of(client, GREY) is False  # all were asked


async def test_a_set_that_does_not_say_leaves_it_out(tmp_path: Path) -> None:
    service, client = served(write_tiny_set(tmp_path / "tiny"))
    assert await sure_of(client, RED) is None
    assert "sure" not in (await client.get("/v1/models")).json()
    assert "sure" not in await infer(client, "tiny", RED)
    reply = await by_grpc(service, RED)
    assert not reply.results[0].classified.HasField("sure")


def test_the_row_of_an_operators_own_function_is_not_judged() -> None:
    rule, row = AnswerRule("ab", sure_from=0.5), np.array([0.9, 0.1], np.float32)
    assert Combined.of(row, {"m": row}, rule, 1, "f").sure is True
    assert Combined.of(row, {"m": row}, rule, 1, "f", is_row_kept=True).sure is None
