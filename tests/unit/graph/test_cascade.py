"""The cascade: who is asked for which image, and what an answer says of those who were not."""

import asyncio
import math
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from app.deployments.assembly import assemble
from app.errors import DeadlineError, NotReadyError, OverloadedError
from app.graph.cascade import Cascade
from app.graph.members import Members
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.responses import Classified
from app.settings import Settings
from app.settings.service import AnswerPolicy
from models.image import ImageRule
from models.image_inputs import ImageInputs
from tests.support.fakes import NOT_AN_IMAGE, FakeCombiner, FakeDecoder, FakeMember, service_of
from tests.support.tiny_networks import COLORS, LABELS, picture, write_tiny_set

SURE, UNSURE = (0.1, 0.8, 0.1), (0.45, 0.35, 0.2)
CLEAR, HARD = b"good", b"good, but hard"  # pixels 4 and 14
NUM_MEMBERS = 3
INPUTS = ImageInputs(dict.fromkeys(("first", "second"), ImageRule(2, 2)))


class Graph:
    """A gateway that skips two members where the first is sure by half."""

    def __init__(
        self,
        tiny_set,
        margin: float | None = 0.5,
        *,
        as_handles: bool = False,
        policy: AnswerPolicy = "all",
    ) -> None:
        self.members = {name: FakeMember() for name in ("first", "second", "third")}
        self.first, self.second, self.third = self.members.values()
        self.first.rows = {len(CLEAR): SURE, len(HARD): UNSURE}
        settings = Settings(model_set=str(tiny_set), cascade_margin=margin, answer_policy=policy)
        stages = (FakeDecoder(), self.members, FakeCombiner())
        self.service = service_of(settings, *stages, as_handles=as_handles)

    async def classify(self, *files: bytes, timeout_s: float = 10.0):
        return await self.service.classify(
            ClassifyRequest(list(files), 3, timeout_s, "id", RequestObserver())
        )


@pytest.fixture
def graph(tiny_set) -> Graph:
    return Graph(tiny_set)


def asked_of(answer: Classified) -> list[str | None]:
    return [stage.member for stage in answer.timings_ms.stages if stage.stage == "infer"]


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
async def test_where_the_first_is_sure_no_other_is_asked(tiny_set, as_handles):
    graph = Graph(tiny_set, as_handles=as_handles)
    (answer,) = await graph.classify(CLEAR)
    assert isinstance(answer, Classified)
    assert list(answer.members) == asked_of(answer) == ["first"]
    assert answer.skipped_members == ["second", "third"]
    assert (answer.degraded, answer.agreement) == (False, True)
    assert answer.predictions[0].label == LABELS[1]
    assert answer.predictions[0].probability == pytest.approx(0.8)
    assert graph.second.seen == graph.third.seen == []


async def test_where_it_is_unsure_all_vote(graph):
    (answer,) = await graph.classify(HARD)
    assert list(answer.members) == asked_of(answer) == ["first", "second", "third"]
    assert answer.skipped_members is None
    assert (answer.degraded, answer.agreement) == (False, False)
    assert answer.predictions[0].label == LABELS[1]
    assert answer.predictions[0].probability == pytest.approx((0.35 + 0.7 + 0.7) / 3)


async def test_the_images_of_a_form_are_decided_one_by_one(graph):
    graph.first.rows |= {4: SURE, 5: UNSURE, 6: SURE, 7: UNSURE}
    files = [b"good", b"good1", b"bad", b"good12", b"good123"]
    answers = await graph.classify(*files)
    assert graph.first.seen == [[4, 5, 6, 7]]
    assert graph.second.seen == graph.third.seen == [[5, 7]]  # stacked
    assert answers[2] == NOT_AN_IMAGE
    others = [answer.skipped_members for answer in answers if isinstance(answer, Classified)]
    assert others == [["second", "third"], None, ["second", "third"], None]
    firsts = [a.members["first"].probability for a in answers if isinstance(a, Classified)]
    assert firsts == pytest.approx([0.8, 0.45, 0.8, 0.45])


async def test_the_timeline_has_the_batches_that_each_image_was_in(graph):
    clear, hard = await graph.classify(CLEAR, HARD)
    sizes = [
        {s.member: s.batch_size for s in answer.timings_ms.stages if s.stage == "infer"}
        for answer in (clear, hard)
    ]
    assert sizes == [{"first": 2}, {"first": 2, "second": 1, "third": 1}]


@hypothesis_settings(max_examples=50, deadline=None, database=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_image_gets_its_own_answer_in_order(lengths):
    """Of image n the first member says n/100; it is sure of the even ones."""
    members = {name: FakeMember((0.0, 0.0, 1.0)) for name in ("first", "second")}
    members["first"].rows = {n: (n / 100, 1.0 if n % 2 == 0 else 0.5, 0.0) for n in range(41)}
    images = np.array([np.full((2, 2, 3), n) for n in lengths], np.uint8)
    cascade = Cascade(Members(members, INPUTS, ""), 0.55)
    request = ClassifyRequest([], 1, 10.0, "id", RequestObserver())
    groups = asyncio.run(cascade.ask(images, request))
    found = {}
    for group in groups:
        rows = group.answers["first"].probabilities
        for row, place in zip(rows, group.images, strict=True):
            found[place] = (round(float(row[0]) * 100), len(group.answers))
        assert all(len(a.probabilities) == len(group.images) for a in group.answers.values())
    expected = [(n, 1 if n % 2 == 0 else 2) for n in lengths]
    assert [found[place] for place in range(len(lengths))] == expected


async def test_the_others_are_asked_at_the_same_time(graph):
    graph.second.gate = graph.third.gate = asyncio.Event()
    request = asyncio.ensure_future(graph.classify(HARD))
    while not (graph.second.asked and graph.third.asked):
        await asyncio.sleep(0)
        assert not request.done()
    graph.second.gate.set()
    await request


async def test_off_all_are_asked_at_the_same_time(tiny_set):
    graph = Graph(tiny_set, None)
    gate = asyncio.Event()
    for member in graph.members.values():
        member.gate = gate
    request = asyncio.ensure_future(graph.classify(CLEAR))
    while not all(member.asked for member in graph.members.values()):
        await asyncio.sleep(0)
    gate.set()
    (answer,) = await request
    assert answer.skipped_members is None
    assert len(answer.members) == NUM_MEMBERS


async def test_the_others_get_the_time_that_the_first_left(graph):
    await graph.classify(HARD, timeout_s=3.0)
    ((_, first),), ((_, second),) = graph.first.asked, graph.second.asked
    assert 0 < second < first <= 3.0


@pytest.mark.parametrize("name", ["first", "second"])
async def test_a_member_that_hangs_ends_with_the_deadline(graph, name):
    graph.members[name].gate = asyncio.Event()
    with pytest.raises(DeadlineError, match=r"no answer within 0\.02 s"):
        await graph.classify(HARD, timeout_s=0.02)
    await asyncio.sleep(0)
    assert graph.members[name].was_cancelled


async def test_a_member_that_fails_spoils_only_requests_that_need_it(graph):
    graph.second.raises = OverloadedError("no place")
    graph.third.gate = asyncio.Event()
    await graph.classify(CLEAR)
    with pytest.raises(OverloadedError, match="no place"):
        await graph.classify(CLEAR, HARD)
    await asyncio.sleep(0)
    assert graph.third.was_cancelled


async def test_without_the_first_the_others_answer_if_they_are_enough(tiny_set):
    graph = Graph(tiny_set, policy="any")
    graph.first.raises = OverloadedError("no place")
    (answer,) = await graph.classify(CLEAR)
    assert isinstance(answer, Classified)
    assert list(answer.members) == ["second", "third"]
    assert answer.missing_members == {"first": "overloaded"}


async def test_where_all_must_answer_a_first_that_fails_ends_the_request(graph):
    graph.first.raises = OverloadedError("no place")
    with pytest.raises(OverloadedError, match="no place"):
        await graph.classify(CLEAR)
    assert graph.second.asked == graph.third.asked == []


async def test_a_caller_that_leaves_lets_the_members_go(graph):
    graph.second.gate = asyncio.Event()
    request = asyncio.ensure_future(graph.classify(HARD))
    while not graph.second.asked:
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(0)
    assert graph.second.was_cancelled


async def test_probabilities_that_are_none_make_nobody_sure(graph):
    graph.first.rows[len(CLEAR)] = (math.nan, 0.9, 0.1)
    (answer,) = await graph.classify(CLEAR)
    assert len(answer.members) == NUM_MEMBERS


async def test_ready_is_when_every_member_answers(graph):
    graph.first.row = SURE  # also of the warm-up image
    graph.third.raises = OverloadedError("full")
    with pytest.raises(NotReadyError, match="full"):
        await graph.service.check_ready()
    graph.third.raises = None
    await graph.service.check_ready()


@pytest.mark.parametrize("margin", [None, 0.5])
def test_what_is_served_tells_the_margin(tiny_set, margin):
    assert Graph(tiny_set, margin).service.served_models().cascade_margin == margin


async def test_a_single_member_has_nobody_to_skip(tmp_path):
    member = FakeMember(SURE)
    folder = write_tiny_set(tmp_path / "of one", gains={"only": 8.0})
    settings = Settings(model_set=str(folder), cascade_margin=0.5)
    service = service_of(settings, FakeDecoder(), {"only": member}, FakeCombiner())
    (answer,) = await service.classify(ClassifyRequest([CLEAR], 1, 10.0, "id", RequestObserver()))
    assert isinstance(answer, Classified)
    assert answer.skipped_members is None
    assert service.served_models().cascade_margin is None


@pytest.mark.parametrize("margin", [None, 0.5])
def test_without_a_margin_there_is_no_cascade(tiny_set, margin):
    graph: Any = Graph(tiny_set, margin).service._graph
    assert (graph.cascade is None) == (margin is None)


async def test_real_networks_and_a_picture_that_they_cannot_tell(tiny_set):
    """A picture half green, half red has a margin of nothing; one all green is told by one."""
    settings = Settings(
        model_set=str(tiny_set), cascade_margin=0.9, batch_sizes=(1, 2), compile_cache=None
    )
    service = assemble(settings).service
    both = np.full((24, 24, 3), COLORS["green"], np.uint8)
    both[:12] = COLORS["red"]
    files = [cv2.imencode(".png", both)[1].tobytes(), picture("green")]
    half, green = await service.classify(ClassifyRequest(files, 1, 10.0, "id", RequestObserver()))
    assert isinstance(half, Classified)
    assert isinstance(green, Classified)
    assert (half.skipped_members, green.skipped_members) == (None, ["unsure"])
    assert green.predictions[0].label == LABELS[1]
    assert green.predictions[0].probability == green.members["sure"].probability
