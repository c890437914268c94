"""The Gateway's graph, and whether an answer is sure over every interface."""

import asyncio
import subprocess
import sys
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from app.answers import OF_OWN_COMBINE, Combined
from app.environment import MIB
from app.errors import NotReadyError
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.http.api import create_api
from app.serve.gateway import Gateway, assemble
from app.settings import Settings
from app.stages.combiner import Combiner
from calibration.sets.transaction import write_manifest
from models.ensemble import AnswerRule, AnswerSetRecord, SubsetRecord, SureRecord, Trust
from models.manifest import read_manifest
from tandem_client.answers import classification_of
from tandem_client.exchange import Options
from tandem_client.grpc_client import _outcomes
from tests.support import fakes
from tests.support.cases import cases
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, handle_of
from tests.support.grpc_contexts import context_of, stalled_stream, stream_of
from tests.support.open_inference import images
from tests.support.plans import planned
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


@pytest.mark.usefixtures("behind_haproxy")
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


OWN = "tests.support.own_functions"
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


def service_of(folder: Path, **more: object):
    settings = Settings(model_set=str(folder), compile_cache=None, **more)
    return assemble(settings).service


def client_of(service) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_api(service)), base_url="http://localhost"
    )


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
    service = service_of(folder, cache=cache)
    client = client_of(service)
    for _ in range(2):  # the second from the cache, if there is one
        assert [await sure_of(client, RED), await sure_of(client, GREY)] == [True, False]
    told = (await client.get("/v1/models")).json()
    assert told["sure"]["probability"] == BOUND
    assert (await infer(client, "tiny", RED))["sure"] is True
    assert (await infer(client, "tiny", RED, GREY))["sure"] is False  # all must be
    assert "sure" not in await infer(client, "tiny.sure", RED)
    incoming = stream_of(ClassifyRequest(images=[RED, GREY]).SerializeToString())
    reply = await GrpcInterface(service).classify(incoming, context_of())
    assert [one.classified.sure for one in reply.results] == [True, False]
    assert [one.sure for one in _outcomes(reply, 2, Options("grpc://x"))] == [True, False]


@pytest.mark.parametrize("cache", ["none", "local"])
@pytest.mark.parametrize(
    ("bounds", "told"),
    [((0.9, 0.9), (True, False)), ((0.999999, 0.3), (False, True)), ((None, None), (None, None))],
)
async def test_a_step_of_a_plan_has_the_bound_of_its_own(
    tmp_path: Path, cache: str, bounds, told
) -> None:
    gains = {"sure": 8.0, "unsure": 4.0}
    folder = write_tiny_set(tmp_path / "tiny", gains=gains, sure=SURE)
    planned(folder, (("sure",), 0.7), (("unsure",), None), bounds=bounds)
    client = client_of(service_of(folder, cache=cache, plan="fast"))
    for _ in range(2):
        assert (await sure_of(client, RED), await sure_of(client, GREY)) == told
        answer = (await client.post("/v1/classify", content=RED)).json()
        assert (answer["plan"], answer["asked"]) == ("fast", ["sure"])
        assert (answer["skipped_members"], "no_sure" in answer) == (["unsure"], told[0] is None)


@cases(
    "trust, sure, why",
    ((), None, "tiny has no measured bound for unsure alone"),
    ((SubsetRecord(members=("unsure",), sure=SURE),), True, None),
)
async def test_a_degraded_answer_has_the_bound_of_those_who_answered(tmp_path, trust, sure, why):
    gains = {"sure": 8.0, "unsure": 4.0}
    write_tiny_set(tmp_path / "tiny", gains=gains, sure=SURE, trust=trust)
    members = {"sure": FakeMember(), "unsure": FakeMember((0.97, 0.02, 0.01))}
    members["sure"].raises = NotReadyError("gone")
    settings = Settings(
        model_set=str(tmp_path / "tiny"), answer_policy="any", member_patience_s=0.0
    )
    service = fakes.service_of(settings, FakeDecoder(), members, Combiner(settings))
    answer = (await client_of(service).post("/v1/classify", content=RED)).json()
    assert (answer["degraded"], answer.get("sure"), answer.get("no_sure")) == (True, sure, why)


@cases(
    "settings, plan, sets",
    ({}, "tiny has no fast plan; tandem evaluate", "--sure-at 0.95 measures their bound"),
    ({"weights": {"sure": 1.0}}, "the setting weights replaces", "of the setting weights"),
    ({"combine": f"{OWN}:vote"}, "the service's own combine", "the service's own combine"),
)
async def test_what_is_not_offered_says_why(tmp_path, settings, plan, sets):
    folder = write_tiny_set(tmp_path / "tiny", gains={"sure": 8.0, "unsure": 4.0})
    client = client_of(service_of(folder, **settings))
    for query, why in (("plan=fast", plan), ("answer_set=true", sets)):
        answer = await client.post(f"/v1/classify?{query}", content=RED)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "not_offered")
        assert why in error["message"]


async def test_an_answer_set_is_listed_where_it_is_asked_for(tmp_path):
    record = AnswerSetRecord(
        probability=0.2, target=0.95, num_images=9, coverage=0.95, mean_size=1.2
    )
    folder = write_tiny_set(tmp_path / "tiny", gains={"sure": 8.0, "unsure": 4.0})
    refused = await client_of(service_of(folder)).post("/v1/classify?answer_set=true", content=RED)
    assert refused.status_code == 400
    assert "tiny has no answer sets here; tandem evaluate" in refused.json()["error"]["message"]
    manifest = read_manifest(folder).model_copy(update={"answer_set": record})
    write_manifest(folder, manifest)
    service = service_of(folder)
    client = client_of(service)
    for picture_, num in ((RED, 1), (GREY, 3)):
        answer = await client.post("/v1/classify?answer_set=true&top_k=1", content=picture_)
        told = classification_of(answer.json())
        assert len(told.answer_set) == num
        assert told.answer_set[0] == told.predictions[0]
    assert "answer_set" not in (await client.post("/v1/classify", content=RED)).json()
    assert (await client.get("/v1/models")).json()["answer_set"]["coverage"] == 0.95
    message = ClassifyRequest(images=[GREY], answer_set=True, plan="full").SerializeToString()
    reply = await GrpcInterface(service).classify(stream_of(message), context_of())
    assert len(reply.results[0].classified.answer_set) == 3
    assert reply.results[0].classified.plan == "full"


async def test_a_set_that_does_not_say_leaves_it_out(tmp_path: Path) -> None:
    service = service_of(write_tiny_set(tmp_path / "tiny"))
    client = client_of(service)
    assert await sure_of(client, RED) is None
    assert "sure" not in (await client.get("/v1/models")).json()
    assert "sure" not in await infer(client, "tiny", RED)
    incoming = stream_of(ClassifyRequest(images=[RED]).SerializeToString())
    reply = await GrpcInterface(service).classify(incoming, context_of())
    assert not reply.results[0].classified.HasField("sure")


def test_the_row_of_an_operators_own_function_is_not_judged() -> None:
    rule, row = AnswerRule("ab"), np.array([0.9, 0.1], np.float32)
    trust = Trust(sure_from=0.5)
    assert Combined.of(row, {"m": row}, rule, 1, "f", trust).sure is True
    own = Combined.of(row, {"m": row}, rule, 1, "f", trust, is_row_kept=True)
    assert (own.sure, own.no_sure) == (None, OF_OWN_COMBINE.no_bound)


async def test_a_gateway_is_not_healthy_before_its_members_answer(tiny_set, monkeypatch):
    member = fakes.FakeMember()
    member.raises = NotReadyError("still loading")
    settings = Settings(model_set=str(tiny_set))
    decoder, combiner = fakes.FakeDecoder(), fakes.FakeCombiner()
    fakes.of_model_set(settings, decoder, member, combiner)
    gateway = Gateway(
        settings,
        fakes.handle_of(decoder),
        {"sure": fakes.handle_of(member)},
        fakes.handle_of(combiner),
    )
    monkeypatch.setattr("app.graph.availability.START_POLL_S", 0)
    check = asyncio.create_task(gateway.check_health())
    while len(member.asked) < 3:
        await asyncio.sleep(0)
    assert not check.done()
    member.raises = None
    await check
    num_asked = len(member.asked)
    await gateway.check_health()
    assert len(member.asked) == num_asked
