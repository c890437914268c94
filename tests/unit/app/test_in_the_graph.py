"""The operator's functions in the graph: what members and clients see, and what a failure does."""

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest

from app.errors import FunctionError, UnhealthyError
from app.graph.request import ClassifyRequest, TensorRequest
from app.http.api import create_api
from app.serve.gateway import assemble
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metric_table import FAILED_FUNCTIONS
from tests.support import own_functions
from tests.support.cases import cases
from tests.support.fakes import FakeDecoder, FakeMember, arrived, service_of
from tests.support.plans import planned
from tests.support.tiny_networks import picture, write_tiny_set

OWN = "tests.support.own_functions"
BAD = {"rows": np.array([[1, 1, 1]], np.float32), "shape": np.array([1, 0, 0], np.float32)}


@pytest.fixture(autouse=True)
def as_new():
    own_functions.calls.clear()
    yield
    own_functions.in_place_of_vote.clear()
    own_functions.hold.set()


class Graph:
    """The service with fake decoder and members: "sure" says class 1, "unsure" class 2."""

    def __init__(self, tiny_set, *, as_handles: bool = False, **settings: object) -> None:
        self.settings = Settings(model_set=str(tiny_set), **settings)
        self.members = {"sure": FakeMember((0.1, 0.8, 0.1)), "unsure": FakeMember((0.3, 0.3, 0.4))}
        stages = (FakeDecoder(), self.members, Combiner(self.settings))
        self.service = service_of(self.settings, *stages, as_handles=as_handles)
        self.ensemble: Any = self.service._graph

    async def classify(self, *files: bytes, **options: Any):
        options = {"plan": self.service.settings.plan} | options
        request = ClassifyRequest(list(files), 3, 10.0, "id", arrived(), **options)
        return await self.service.classify(request)


def row_of(answer) -> list[float]:
    return [p.probability for p in sorted(answer.predictions, key=lambda p: p.index)]


@pytest.mark.parametrize("as_handles", [False, True])
async def test_members_see_every_view_and_answer_the_mean(tiny_set, as_handles):
    graph = Graph(tiny_set, preprocess=f"{OWN}:with_negatives", as_handles=as_handles)
    for member in graph.members.values():  # images of 4 and 8; their negatives 251, 247
        member.rows = {4: (1, 0, 0), 251: (0, 1, 0), 8: (0, 0, 1), 247: (0, 0, 1)}
    first, second = await graph.classify(b"good", b"good two")
    for member in graph.members.values():
        assert sorted(pixel for call in member.seen for pixel in call) == [4, 8, 247, 251]
    assert row_of(first) == pytest.approx([0.5, 0.5, 0])
    assert row_of(second) == pytest.approx([0, 0, 1])
    assert [p.probability for p in first.members["sure"].predictions[:2]] == [0.5, 0.5]
    assert [s.stage for s in first.timings_ms.stages][:3] == ["read", "decode", "preprocess"]


async def test_a_plan_decides_by_the_mean_of_the_views(tmp_path):
    folder = planned(write_tiny_set(tmp_path / "tiny"), (("sure",), 0.7), (("unsure",), None))
    graph = Graph(folder, preprocess=f"{OWN}:with_negatives", plan="fast")
    graph.members["sure"].rows = {4: (1, 0, 0), 251: (0, 1, 0), 8: (0, 0, 1), 247: (0, 0, 1)}
    unsure, sure = await graph.classify(b"good", b"good two")
    assert (unsure.skipped_members, sure.skipped_members) == (None, ["unsure"])
    assert graph.members["unsure"].seen == [[4, 251]]


async def test_a_vote_instead_of_the_average(tiny_set):
    (answer,) = await Graph(tiny_set, combine=f"{OWN}:vote").classify(b"good")
    assert row_of(answer) == [0, 0.5, 0.5]
    assert answer.members["sure"].label == "mostly green"


async def test_a_vote_of_those_that_answered(tiny_set):
    graph = Graph(tiny_set, combine=f"{OWN}:vote", answer_policy="any", member_patience_s=0)
    graph.members["sure"].raises = RuntimeError("broken")
    (answer,) = await graph.classify(b"good")
    assert row_of(answer) == [0, 0, 1]
    assert answer.degraded


async def test_tensors_have_the_functions_rows_and_a_member_alone_its_own(tiny_set):
    graph = Graph(tiny_set, combine=f"{OWN}:vote")
    (of_all,) = await graph.classify(b"good", tensors=TensorRequest())
    (of_one,) = await graph.classify(b"good", tensors=TensorRequest(member="unsure"))
    assert of_all.probabilities.tolist() == [0, 0.5, 0.5]
    assert of_one.probabilities.tolist() == pytest.approx([0.3, 0.3, 0.4])
    assert own_functions.calls.count(("combine", 1)) == 2  # one of the trial


async def test_what_is_cached_is_the_functions_answer(tiny_set):
    graph = Graph(tiny_set, combine=f"{OWN}:vote", cache="local")
    own_functions.calls.clear()
    first, again = [(await graph.classify(b"good"))[0] for _ in range(2)]
    assert (first.cached, again.cached) == (None, True)
    assert row_of(first) == row_of(again) == [0, 0.5, 0.5]
    assert again.members == first.members
    assert own_functions.calls == [("combine", 1)]


def test_no_answer_of_another_function_is_found_in_a_cache(tiny_set):
    names = [None, f"{OWN}:vote", f"{OWN}:wants_both"]
    graphs = [Graph(tiny_set, cache="local", combine=name) for name in names]
    graphs.append(Graph(tiny_set, cache="local", preprocess=f"{OWN}:identity"))
    assert len({graph.ensemble.keys.key(b"a") for graph in graphs}) == len(graphs)


@cases(
    "settings, says",
    ({"preprocess": f"{OWN}:raises_when_served"}, "raises_when_served.* raised RuntimeError;"),
    ({"preprocess": f"{OWN}:leaves_when_served"}, "leaves_when_served.* raised SystemExit;"),
    ({"preprocess": f"{OWN}:fewer_when_served"}, r"returned uint8 \(0, 2, 2, 3\), not uint8"),
)
async def test_a_failure_is_the_requests_error(tiny_set, told, caplog, settings, says):
    graph = Graph(tiny_set, **settings)
    for _ in range(2):  # and of no other request: this one fails by itself
        with pytest.raises(FunctionError, match=says) as raised:
            await graph.classify(b"good")
    assert (raised.value.status, raised.value.code) == (500, "function")
    assert "own words" not in raised.value.message
    (stage,) = settings
    assert told.of(FAILED_FUNCTIONS) == {(stage,): 2}
    assert f"{stage} ({settings[stage]}) failed" in caplog.text


@pytest.mark.parametrize("as_handles", [False, True])
@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_answer_of_combine_is_the_requests_error(tiny_set, as_handles, bad):
    graph = Graph(tiny_set, combine=f"{OWN}:vote", cache="local", as_handles=as_handles)
    own_functions.in_place_of_vote.append(lambda members: BAD[bad])
    with pytest.raises(FunctionError, match=r"combine .*own_functions:vote.* returned "):
        await graph.classify(b"good")
    own_functions.in_place_of_vote.clear()
    (answer,) = await graph.classify(b"good")
    assert row_of(answer) == [0, 0.5, 0.5]


async def test_a_call_that_hangs_leaves_the_loop_free_and_is_unhealthy(tiny_set):
    own_functions.hold.clear()
    graph = Graph(tiny_set, preprocess=f"{OWN}:hangs_when_served")
    request = asyncio.create_task(graph.classify(b"good"))
    calls = graph.ensemble._preprocess.calls
    while not calls._health._running:
        await asyncio.sleep(0)
    graph.ensemble.check_health()
    calls._health._clock = lambda: time.monotonic() + 31
    with pytest.raises(UnhealthyError, match=r"call of .*hangs_when_served has run for 31 s"):
        graph.ensemble.check_health()
    own_functions.hold.set()
    await request


async def test_a_whole_graph_over_http(tiny_set):
    own = {"preprocess": "configs.functions.mirroring:with_mirror_images", "combine": f"{OWN}:vote"}
    settings = Settings(model_set=str(tiny_set), compile_cache=None, **own)
    graph = assemble(settings)
    transport = httpx.ASGITransport(create_api(graph.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = (await client.post("/v1/classify", content=picture("red"))).json()
        models = (await client.get("/v1/models")).json()
        await graph.check_health()
        assert answer["predictions"][0]["label"] == "mostly red"
        assert answer["predictions"][0]["probability"] == 1  # both votes
        assert (models["preprocess"], models["combine"]) == (settings.preprocess, f"{OWN}:vote")
        own_functions.in_place_of_vote.append(lambda members: 1 / 0)
        failed = await client.post("/v1/classify", content=picture("red"))
        of_form = await client.post("/v1/classify", files=[("files", ("a.png", picture("red")))])
    assert (failed.status_code, of_form.status_code) == (500, 500)
    assert failed.json()["error"]["code"] == "function"
    assert f"combine ({OWN}:vote)" in failed.json()["error"]["message"]
