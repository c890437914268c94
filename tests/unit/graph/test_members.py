"""The members: fast plans, requests that end as soon as they can, and different inputs."""

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.answers import Classified, Fault, MemberAnswer
from app.errors import ConfigError, NotReadyError, OverloadedError
from app.graph.members import FastMembers, Members, needed_of
from app.graph.request import ClassifyRequest, TensorRequest
from app.oip.inference import Inference
from app.oip.models import Models
from app.serve.gateway import assemble
from app.settings import AnswerPolicy, Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from app.telemetry.metrics import RequestObserver
from calibration.offline import InProcessPipeline, OneImage, Setup
from models.ensemble import average
from models.errors import TandemError
from models.image import ImageInputs, ImageRule, read_image
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import ImageRecord
from tests.support.fakes import NOT_AN_IMAGE, FakeCombiner, FakeDecoder, FakeMember, service_of
from tests.support.images import encode, make_scene
from tests.support.plans import plan_of, planned
from tests.support.tiny_networks import COLORS, LABELS, picture, write_tiny_set
from tests.support.virtual_loop import run_virtually

SURE, UNSURE = (0.1, 0.8, 0.1), (0.45, 0.35, 0.2)
CLEAR, HARD = b"good", b"good, but hard"  # pixels 4 and 14
NUM_MEMBERS = 3
WEIGHTS = {"first": 1.0, "second": 1.0}
INPUTS = ImageInputs(dict.fromkeys(("first", "second"), ImageRule(2, 2)))


STOP_AT = 0.6
TWO_STEPS = plan_of("", ((("first",), 0.55), (("second",), None)))
MEMBERS = {"first": 8.0, "second": -4.0, "third": 2.0}
NAMES = ("first", "second", "third")
TIMEOUT_S, PATIENCE_S = 16.0, 0.5
EARLY_S = 1e-6  # asyncio's timers fire up to the clock's resolution early or late


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny", gains=MEMBERS)
    return planned(folder, (("first",), STOP_AT), (("second", "third"), None))


class Graph:
    """A gateway that skips two members where the first is sure enough."""

    def __init__(self, three, plan="fast", *, as_handles=False, policy="all"):
        self.members = {name: FakeMember() for name in ("first", "second", "third")}
        self.first, self.second, self.third = self.members.values()
        self.first.rows = {len(CLEAR): SURE, len(HARD): UNSURE}
        settings = Settings(model_set=str(three), plan=plan, answer_policy=policy)
        stages = (FakeDecoder(), self.members, FakeCombiner())
        self.service = service_of(settings, *stages, as_handles=as_handles)

    async def classify(self, *files: bytes, timeout_s: float = 10.0):
        plan = self.service.settings.plan
        return await self.service.classify(
            ClassifyRequest(list(files), 3, timeout_s, "id", RequestObserver(), plan=plan)
        )


@pytest.fixture
def graph(three) -> Graph:
    return Graph(three)


def asked_of(answer: Classified) -> list[str | None]:
    return [stage.member for stage in answer.timings_ms.stages if stage.stage == "infer"]


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
async def test_where_the_first_is_sure_no_other_is_asked(three, as_handles):
    graph = Graph(three, as_handles=as_handles)
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
    answers = await graph.classify(*[b"good", b"good1", b"bad", b"good12", b"good123"])
    assert graph.first.seen == [[4, 5, 6, 7]]
    assert graph.second.seen == graph.third.seen == [[5, 7]]  # stacked
    assert answers[2] == NOT_AN_IMAGE
    others = [answer.skipped_members for answer in answers if isinstance(answer, Classified)]
    assert others == [["second", "third"], None, ["second", "third"], None]
    firsts = [a.members["first"].probability for a in answers if isinstance(a, Classified)]
    assert firsts == pytest.approx([0.8, 0.45, 0.8, 0.45])


async def test_the_timeline_has_the_batches_that_each_image_was_in(graph):
    clear, hard = await graph.classify(CLEAR, HARD)
    assert [
        {s.member: s.batch_size for s in answer.timings_ms.stages if s.stage == "infer"}
        for answer in (clear, hard)
    ] == [{"first": 2}, {"first": 2, "second": 1, "third": 1}]


@settings(max_examples=50, deadline=None, database=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_image_gets_its_own_answer_in_order(lengths):
    """Of image n the first member says n/100; it is sure of the even ones."""
    # What a member says need not add up to one.
    members = {name: FakeMember((0.0, 0.0, 1.0)) for name in ("first", "second")}
    members["first"].rows = {n: (n / 100, 1.0 if n % 2 == 0 else 0.5, 0.0) for n in range(41)}
    images = np.array([np.full((2, 2, 3), n) for n in lengths], np.uint8)
    cascade = FastMembers(TWO_STEPS, Members(members, INPUTS, ""), WEIGHTS)
    groups = asyncio.run(cascade.ask(images, ClassifyRequest([], 1, 10.0, "id", RequestObserver())))
    found = {}
    for group in groups:
        for row, place in zip(group.answers["first"].probabilities, group.images, strict=True):
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


async def test_the_others_get_the_time_that_the_first_left(graph):
    await graph.classify(HARD, timeout_s=3.0)
    ((_, first),), ((_, second),) = graph.first.asked, graph.second.asked
    assert 0 < second < first <= 3.0


async def test_a_member_that_fails_spoils_only_requests_that_need_it(graph):
    graph.second.raises = OverloadedError("no place")
    graph.third.gate = asyncio.Event()
    await graph.classify(CLEAR)
    with pytest.raises(OverloadedError, match="no place"):
        await graph.classify(CLEAR, HARD)
    await asyncio.sleep(0)
    assert graph.third.was_cancelled


async def test_where_all_must_answer_a_first_that_fails_ends_the_request(graph):
    graph.first.raises = OverloadedError("no place")
    with pytest.raises(OverloadedError, match="no place"):
        await graph.classify(CLEAR)
    assert graph.second.asked == graph.third.asked == []


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


async def test_what_is_served_tells_the_plan(three):
    told: Any = Graph(three).service.served_models()
    assert told.plan == "fast"
    assert [step["ask"] for step in told.fast_plan["steps"]] == [["first"], ["second", "third"]]
    assert Graph(three, "full").service.served_models().plan == "full"


async def test_three_steps_each_about_the_images_that_are_left(three, tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", gains=MEMBERS)
    planned(folder, (("second",), 0.6), (("first",), 0.6), (("third",), None))
    graph = Graph(folder)
    graph.second.rows = {4: SURE, 5: UNSURE, 6: UNSURE}
    graph.first.rows = {5: (0.1, 0.9, 0.0), 6: UNSURE}
    answers = await graph.classify(b"good", b"good1", b"good12")
    order = ["second", "first", "third"]
    assert [list(a.members) for a in answers] == [order[:1], order[:2], order]
    assert [a.asked for a in answers] == [list(a.members) for a in answers]
    assert [a.plan for a in answers] == ["fast"] * 3
    assert (graph.second.seen, graph.first.seen, graph.third.seen) == ([[4, 5, 6]], [[5, 6]], [[6]])


async def test_a_set_without_a_plan_refuses_the_setting_and_answers_full(tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", gains=MEMBERS)
    with pytest.raises(ConfigError, match=r"plan is fast, and tiny has no fast plan; tandem eval"):
        Graph(folder)
    graph = Graph(folder, "full")
    request = ClassifyRequest([CLEAR], 1, 10.0, "id", RequestObserver(), plan="fast")
    (answer,) = await graph.service.classify(request)
    assert (answer.plan, len(answer.members)) == ("full", NUM_MEMBERS)


async def test_real_networks_and_a_picture_that_they_cannot_tell(tmp_path):
    """Of a picture half green, half red neither is sure; one all green is told by one."""
    folder = planned(write_tiny_set(tmp_path / "tiny"), (("sure",), 0.9), (("unsure",), None))
    settings = Settings(model_set=str(folder), plan="fast", batch_sizes=(1, 2), compile_cache=None)
    service = assemble(settings).service
    both = np.full((24, 24, 3), COLORS["green"], np.uint8)
    both[:12] = COLORS["red"]
    files = [cv2.imencode(".png", both)[1].tobytes(), picture("green")]
    request = ClassifyRequest(files, 1, 10.0, "id", RequestObserver(), plan="fast")
    half, green = await service.classify(request)
    assert isinstance(half, Classified)
    assert isinstance(green, Classified)
    assert (half.skipped_members, green.skipped_members) == (None, ["unsure"])
    assert green.predictions[0].label == LABELS[1]
    assert green.predictions[0].probability == green.members["sure"].probability


@dataclass(frozen=True)
class Plan:
    """What a member does when it is asked: after ``takes_s`` (inf: hangs) it answers or fails."""

    takes_s: float
    answers: bool
    circuit: str  # closed; open; trial: open, and it may be tried now


PLANS = st.builds(
    Plan,
    st.sampled_from([0.0, 0.25, 1.0, 2.0, math.inf]),
    st.booleans(),
    st.sampled_from(["closed", "open", "trial"]),
)
BOUNDED = settings(
    max_examples=400,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DOWN = Plan(0.0, False, "open")


class PlannedMember(FakeMember):
    """Notes when its one call began."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.began_s = plan, math.nan
        self.rows = {len(CLEAR): np.array((0.1, 0.8, 0.1), np.float32)}
        self.rows |= {len(HARD): np.array((0.45, 0.35, 0.2), np.float32)}

    async def classify(
        self, images, left_s, lane="interactive", *, has_features=False
    ) -> MemberAnswer:
        self.began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self.plan.takes_s if self.plan.takes_s < math.inf else 10 * TIMEOUT_S)
        if not self.plan.answers:
            raise NotReadyError("gone")
        return await super().classify(images, left_s, lane)


class Play:
    """One request for files to members with plans."""

    def __init__(
        self, folder: Path, policy: AnswerPolicy, plans: list[Plan], files: list[bytes]
    ) -> None:
        self.members = {n: PlannedMember(p) for n, p in zip(NAMES, plans, strict=False)}
        self.files, self.needed = files, needed_of(policy, len(plans))
        self.settings = Settings(
            model_set=str(folder), answer_policy=policy, member_patience_s=PATIENCE_S
        )
        self.answers: list[Classified | Fault] | None = None
        self.ended_s = math.nan

    def run(self, plan):
        self.settings = self.settings.model_copy(update={"plan": plan})
        run_virtually(self._run())

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        service = service_of(self.settings, FakeDecoder(), self.members, FakeCombiner())
        ensemble: Any = service._graph
        assert isinstance(ensemble.members, Members)
        for name, breaker in ensemble.members.breakers.items():
            trip(breaker, self.members[name].plan.circuit)
        plan, observer = self.settings.plan, RequestObserver(clock)
        request = ClassifyRequest(self.files, 3, TIMEOUT_S, "id", observer, plan=plan)
        try:
            self.answers = await service.classify(request)
        except TandemError:
            self.answers = None
        self.ended_s = clock()

    @property
    def asked(self) -> list[PlannedMember]:
        return [member for member in self.members.values() if not math.isnan(member.began_s)]

    def last_event_s(self) -> float:
        """When the last call began, or ended that does."""
        ends = [m.began_s + m.plan.takes_s for m in self.asked if m.plan.takes_s < math.inf]
        return max([0.0, *ends, *(m.began_s for m in self.asked)])


def trip(breaker, state):
    """Put a circuit into a state that lasts as long as a request."""
    now = [0.0]
    breaker._clock = lambda: now[0]
    if state != "closed":
        breaker.failed()
    if state == "trial":
        now[0] += 1000.0


def good(members: list[PlannedMember]) -> int:
    return sum(m.plan.answers and m.plan.takes_s < math.inf for m in members)


def hung(members: list[PlannedMember]) -> int:
    return sum(m.plan.takes_s == math.inf for m in members)


def settled_s(asked: list[PlannedMember], needed: int) -> float:
    """Return when so many have failed that ``needed`` cannot answer any more."""
    failed = sorted(m.began_s + m.plan.takes_s for m in asked if not m.plan.answers)
    most = max(0, len(asked) - needed)  # that may fail
    return failed[most] if most < len(failed) else TIMEOUT_S


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Path:
    gains = {name: MEMBERS[name] for name in ("first", "second")}
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny", gains=gains)
    return planned(folder, (("first",), STOP_AT), (("second",), None))


@BOUNDED
@given(
    policy=st.sampled_from(["all", "quorum", "any"]),
    plans=st.lists(PLANS, min_size=2, max_size=3),
    plan=st.sampled_from(["full", "fast"]),
    files=st.lists(st.sampled_from([CLEAR, HARD]), min_size=1, max_size=3),
)
@example("any", [Plan(0.0, True, "closed"), DOWN, DOWN], "fast", [HARD])  # hung on e917524
@example("any", [Plan(0.0, True, "closed"), DOWN], "fast", [CLEAR, HARD])
def test_a_request_ends_as_soon_as_nothing_more_can_come(of_two, three, policy, plans, plan, files):
    play = Play(of_two if len(plans) == 2 else three, policy, plans, files)
    play.run(plan)
    asked, needed = play.asked, play.needed
    first = play.members["first"]
    is_cascade = plan == "fast"
    can_do_without_first = needed < len(plans)
    if is_cascade and first in asked and hung([first]) and can_do_without_first:
        # It has half of the time, and then it is out.
        assert play.ended_s >= TIMEOUT_S / 2 - EARLY_S
        assert {m.began_s for m in asked if m is not first} == {TIMEOUT_S / 2}
        asked = [member for member in asked if member is not first]
    is_enough = good(asked) >= needed
    if is_cascade and good([first]) and first in asked and HARD not in files:
        is_enough, asked = True, [first]
        assert play.asked == [first]
    assert (play.answers is not None) == is_enough
    if is_enough:
        patience_s = PATIENCE_S if hung(asked) else 0.0
        assert play.ended_s <= play.last_event_s() + patience_s + EARLY_S
    elif is_cascade and first in asked and hung([first]):
        assert asked == [first]  # there is no answer without it
    else:
        rest = [m for m in asked if m is not first] if is_cascade else asked
        assert play.ended_s <= settled_s(rest or asked, needed - good(asked) + good(rest)) + EARLY_S
    assert play.ended_s <= TIMEOUT_S + EARLY_S
    check_answers(play, is_cascade)


def check_answers(play: Play, is_cascade: bool) -> None:
    if play.answers is None:
        return
    assert len(play.answers) == len(play.files)
    for file, answer in zip(play.files, play.answers, strict=True):
        missing, skipped = answer.missing_members or {}, answer.skipped_members or []
        assert {*answer.members, *missing, *skipped} == {*play.members}
        assert answer.degraded == bool(missing)
        assert bool(skipped) <= (is_cascade and file == CLEAR)
        assert len(answer.members) >= (1 if skipped else play.needed)


OWN = {
    "small": ImageRecord(input_size=8, resize_shorter=9),
    "stretched": ImageRecord(input_size=16, resize_shorter=16, resize="stretch"),
}
GAINS = {"usual": 8.0, "small": -4.0, "stretched": 2.0}
PICTURES = [encode(make_scene(60, 40 + 9 * n), "PNG") for n in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_tiny_set(tmp_path_factory.mktemp("sets") / "three", gains=GAINS, images=OWN)
    return planned(folder, (("usual",), 0.8), (("small", "stretched"), None))


def service(folder, *, as_handles=False, **changes):
    settings = Settings(model_set=str(folder), compile_cache=None, batch_sizes=(1, 4), **changes)
    decoder, combiner = Decoder(settings), Combiner(settings)
    members = {name: Classifier(settings, name) for name in GAINS}
    return service_of(settings, decoder, members, combiner, as_handles=as_handles)


def rows_in_process(model_set: ModelSet, data: bytes) -> dict[str, np.ndarray]:
    """Return what each network says of a picture that was read for it alone."""
    manifest, options = model_set.manifest, RuntimeOptions(batch_sizes=(1,))
    return {
        name: CompiledNetwork(model_set.network_path(name), options).predict(
            read_image(data, manifest.image_of(name).rule)[None]
        )
        for name in GAINS
    }


def check(answer: Classified | Fault, model_set: ModelSet, data: bytes) -> None:
    assert isinstance(answer, Classified)
    rows = rows_in_process(model_set, data)
    for name, opinion in answer.members.items():
        first = opinion.predictions[0]
        assert first.index == rows[name][0].argmax()
        assert first.probability == pytest.approx(float(rows[name].max()), abs=1e-4)
    mean = average({name: rows[name] for name in answer.members}, dict.fromkeys(rows, 1.0))[0]
    assert answer.predictions[0].probability == pytest.approx(float(mean.max()), abs=1e-4)


@pytest.mark.parametrize("as_handles", [False, True])
@pytest.mark.parametrize("plan", ["full", "fast"])
async def test_each_image_is_answered_as_in_process(folder, as_handles, plan):
    model_set = load_model_set(str(folder))
    graph = service(folder, as_handles=as_handles, plan=plan)
    files = [PICTURES[0], b"no image", *PICTURES[1:]]
    request = ClassifyRequest(files, 2, 10.0, "id", RequestObserver(), plan=plan)
    answers = await graph.classify(request)
    assert isinstance(answers[1], Fault)
    for answer, data in zip([answers[0], *answers[2:]], PICTURES, strict=True):
        check(answer, model_set, data)
    (alone,) = await graph.classify(ClassifyRequest(PICTURES[:1], 2, 10.0, "id", RequestObserver()))
    check(alone, model_set, PICTURES[0])


async def test_the_bound_and_evaluation_make_the_same_inputs(folder):
    model_set = load_model_set(str(folder))
    rows = [rows_in_process(model_set, data) for data in PICTURES]
    means = np.concatenate([average(row, dict.fromkeys(row, 1.0)) for row in rows])
    bound = InProcessPipeline(model_set, "INT8", Setup(batch_size=4, streams=1, threads=1))
    np.testing.assert_allclose(bound.answer(PICTURES[:4]), means[:4], atol=1e-4)
    assert OneImage(model_set, "INT8").measure(PICTURES, num_images=1) > 0


async def test_pixels_are_for_a_member_alone(folder):
    graph = service(folder)
    told = graph.served_models()
    assert told.resize_shorter == 16  # the largest of the three
    sizes = {"usual": 16, "small": 8, "stretched": 16}
    assert {m.name: m.input_size for m in told.members} == sizes
    models = Models(told)
    assert [t.name for t in models.find("tiny").metadata().inputs] == ["image"]
    assert models.find("tiny.small").metadata().inputs[1].shape == [-1, 8, 8, 3]
    assert [t.name for t in models.find("tiny").metadata().outputs] == ["probabilities", "label"]
    told.members[0].embedding = 12
    embedding = Models(told).find(f"tiny.{told.members[0].name}").metadata().outputs[2]
    assert (embedding.name, embedding.datatype, embedding.shape) == ("embedding", "FP32", [-1, 12])
    tensors = TensorRequest(read_image(PICTURES[0], OWN["small"].rule)[None], "small")
    request = ClassifyRequest([], 2, 10.0, "id", RequestObserver(), tensors=tensors)
    (answer,) = await graph.classify(request)
    expected = rows_in_process(load_model_set(str(folder)), PICTURES[0])["small"]
    assert answer.predictions[0].probability == pytest.approx(float(expected.max()), abs=1e-4)
    names = [model.name for model in Inference(graph).models.all]
    assert names == ["tiny", *(f"tiny.{name}" for name in GAINS)]
