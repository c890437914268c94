"""The service: limits and deadlines of requests, who hears of answers, figures."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from app import errors
from app.access import Caller
from app.answers import Classified
from app.environment import GATEWAY_TIMEOUT, GATEWAY_TIMEOUT_S
from app.graph.request import ClassifyRequest, RequestBody, RequestOptions, TensorRequest
from app.graph.service import EnsembleService, answer_timeout_s
from app.grpc import tandem_pb2 as messages
from app.grpc.interface import GrpcInterface, reply_of
from app.main import build
from app.queueing.admission import Admission, ByteBudget, Share, Usage
from app.serve.gateway import assemble
from app.serve.replica import ClassifierReplica, CombinerReplica, DecoderReplica
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metric_table import ANSWERS, PLAN_STEPS
from app.telemetry.metrics import RequestObserver
from models.model_set import load_model_set
from tests.support import fakes
from tests.support.cases import cases
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.hand_clock import HandClock
from tests.support.open_inference import IMAGE, Graph, client_of, images, infer
from tests.support.tiny_networks import SIZE, picture

CLIENT = Caller("127.0.0.1")  # as HTTPX's transport says


class Taken(fakes.FakeService):
    """The service's way into the graph, and the requests that it handed on."""

    def __init__(self, answer_timeout_s: float = 10.0, **settings: object) -> None:
        super().__init__(Settings(**settings), num_classes=3)
        self.answer_within(answer_timeout_s)
        self.clock = HandClock()
        self.byte_budget = ByteBudget(1000)
        self.admission = Admission(1)
        self.num_read, self.body_s = 0, 0.0
        self.body = RequestBody([])

    async def ask(self, *files, top_k_of_body=None, **options):
        self.body = RequestBody(list(files), top_k_of_body)
        observer = RequestObserver(self.clock.monotonic)
        with self.admit(RequestOptions("id", **options), observer) as admitted:
            async with admitted.arriving():
                self.read(admitted.share)
            await admitted.answer(self.body)

    def read(self, share: Share) -> None:
        self.num_read += 1
        self.clock.now += self.body_s
        share.grow(sum(map(len, self.body.files)))

    async def classify(self, request: ClassifyRequest) -> list:
        self.requests.append(request)
        self.held = self.byte_budget.num_held
        return []


async def test_a_key_asks_only_its_sets_and_in_its_lane():
    taken, caller = Taken(), Caller("bob", lane="bulk", sets=frozenset({"fake"}), has_key=True)
    await taken.ask(b"a", caller=caller, priority="u=0")
    assert (taken.requests[0].lane, taken.requests[0].caller) == ("bulk", caller)
    other, num_read = replace(caller, sets=frozenset({"b"})), taken.num_read
    for name in (None, "fake"):
        with pytest.raises(errors.ForbiddenError, match="bob may not ask fake; name one of b"):
            await taken.ask(b"a", caller=other, model_set=name)
    assert taken.num_read == num_read + 1  # a set that the body may name
    assert (len(taken.requests), taken.admission.num_under_way) == (1, 0)


@cases("asked, expected", (None, 10.0), (2.5, 2.5), (99.0, 10.0), (float("inf"), 10.0))
async def test_a_client_can_only_shorten_the_time(asked, expected):
    taken = Taken()
    await taken.ask(b"a", timeout_s=asked)
    assert taken.requests[0].timeout_s == expected


async def test_the_answer_has_its_own_time_from_when_the_body_is_there():
    taken = Taken(answer_timeout_s=4.0)
    taken.body_s = 3.0
    await taken.ask(b"a")
    await taken.ask(b"a", timeout_s=5.0)
    assert [request.timeout_s for request in taken.requests] == [7.0, 5.0]
    assert taken.requests[1].left_s == 2.0


@pytest.mark.parametrize(("asked", "expected"), [(None, 3), (1, 1), (3, 3)])
async def test_top_k_is_the_settings_unless_asked_and_never_more_than_there_are(asked, expected):
    taken = Taken(default_top_k=5)
    await taken.ask(b"a", top_k=asked)
    assert taken.requests[0].top_k == expected


@pytest.mark.parametrize("top_k", [0, -1, 4])
async def test_a_top_k_that_is_none_is_refused_before_anything_is_read(top_k):
    taken = Taken()
    refusal = f"top_k is {top_k}; this model set has 3 classes: ask for 1 to 3"
    with pytest.raises(errors.BadParameterError, match=refusal):
        await taken.ask(b"a", top_k=top_k)
    assert taken.num_read == 0


async def test_a_top_k_that_the_body_has_counts():
    taken = Taken(default_top_k=1)
    await taken.ask(b"a", top_k_of_body=2)
    assert taken.requests[0].top_k == 2
    with pytest.raises(errors.BadParameterError, match="top_k is 4"):
        await taken.ask(b"a", top_k_of_body=4)
    assert len(taken.requests) == 1


async def test_nothing_is_read_of_a_request_that_is_not_admitted():
    taken = Taken()
    with taken.admission.admit(), pytest.raises(errors.OverloadedError):
        await taken.ask(b"a")
    assert taken.num_read == 0


async def test_bytes_are_held_until_the_answer_is_there():
    taken = Taken()
    await taken.ask(b"abc", b"de")
    assert (taken.held, taken.byte_budget.num_held) == (5, 0)


@pytest.mark.parametrize(
    ("files", "priority", "lane"),
    [((b"a",), None, "interactive"), ((b"a", b"b"), None, "bulk"), ((b"a",), "u=7", "bulk")],
)
async def test_the_lane_is_by_the_number_of_files_unless_the_client_says(files, priority, lane):
    taken = Taken()
    await taken.ask(*files, priority=priority)
    assert taken.requests[0].lane == lane


async def test_a_body_that_does_not_come_is_not_waited_for_beyond_the_request():
    taken = Taken()
    options = RequestOptions("id", timeout_s=0.01)
    with pytest.raises(errors.SlowBodyError), taken.admit(options, RequestObserver()) as admitted:
        async with admitted.arriving():
            await asyncio.Future()
    assert taken.admission.num_under_way == 0


# An answer has less time on a cluster than HAProxy waits before it asks another Gateway.


@pytest.fixture
def on_a_node(monkeypatch):
    """What ``tandem environment`` sets there."""
    monkeypatch.setenv(GATEWAY_TIMEOUT, str(GATEWAY_TIMEOUT_S))


@pytest.mark.parametrize("limit_s", [4.1, float(GATEWAY_TIMEOUT_S), 10.0])
@pytest.mark.usefixtures("on_a_node")
def test_a_gateway_that_haproxy_would_give_up_is_refused(tiny_set, limit_s):
    refusal = rf"answer_timeout_s is {limit_s:g}, and after 5 s .* set it to 4 at most, or leave it"
    with pytest.raises(errors.ConfigError, match=f"{refusal} out"):
        build(Settings(model_set=str(tiny_set), answer_timeout_s=limit_s))
    for answers_before in (None, 3.9):
        build(Settings(model_set=str(tiny_set), answer_timeout_s=answers_before))


@cases("given, request_s, expected", (None, 10, 4), (3, 10, 3), (None, 2, 2), (4, 2, 2))
@pytest.mark.usefixtures("on_a_node")
def test_on_a_node_it_is_less_than_haproxy_waits(given, request_s, expected):
    settings = Settings(answer_timeout_s=given, request_timeout_s=request_s)
    assert answer_timeout_s(settings) == expected


@pytest.mark.parametrize("value", [None, "", "0"])
@pytest.mark.parametrize(("given", "expected"), [(None, 10), (25, 10), (3, 3)])
def test_elsewhere_it_is_the_requests(monkeypatch, value, given, expected):
    if value is not None:
        monkeypatch.setenv(GATEWAY_TIMEOUT, value)
    assert answer_timeout_s(Settings(answer_timeout_s=given, request_timeout_s=10)) == expected


# Who hears of answers: of all that a caller got for files, and of nothing else.


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[bytes], list[str]]] = []
        self.probabilities: list[np.ndarray | None] = []

    def note(self, request_id, files, answers):
        kinds = [type(answer).__name__ for answer in answers]
        self.probabilities = [getattr(answer, "probabilities", None) for answer in answers]
        self.heard.append((request_id, list(files), kinds))


@pytest.fixture
def service(tiny_set) -> EnsembleService:
    settings = Settings(model_set=str(tiny_set))
    members = {"sure": fakes.FakeMember(), "unsure": fakes.FakeMember()}
    return fakes.service_of(settings, fakes.FakeDecoder(), members, Combiner(settings))


def request(*files: bytes, tensors: TensorRequest | None = None) -> ClassifyRequest:
    return ClassifyRequest(list(files), 1, 10.0, "id", RequestObserver(), tensors=tensors)


async def test_every_file_of_a_request(service: EnsembleService) -> None:
    service.listeners.append(listener := Listener())
    await service.classify(request(b"good", b"bad"))
    assert listener.heard == [("id", [b"good", b"bad"], ["Classified", "Fault"])]
    assert listener.probabilities == [None, None]


async def test_files_by_the_open_inference_protocol(service: EnsembleService) -> None:
    service.listeners.append(listener := Listener())
    await service.classify(request(b"good", tensors=TensorRequest()))
    assert [heard[1:] for heard in listener.heard] == [([b"good"], ["Classified"])]
    assert listener.probabilities[0].shape == (3,)


@cases("tensors", TensorRequest(np.zeros((1, 2, 2, 3), np.uint8)), TensorRequest(member="sure"))
async def test_pixels_and_questions_to_a_member_are_left_out(service, tensors):
    service.listeners.append(listener := Listener())
    files = (b"good",) if tensors.pixels is None else ()
    assert len(await service.classify(request(*files, tensors=tensors))) == 1
    assert listener.heard == []


async def test_labels_are_those_of_each_set(service: EnsembleService) -> None:
    labels = service.served_models().labels
    for named in (labels[1], 1, "1", "01"):
        assert service.labels_named(named) == {service.name: labels[1]}
    assert service.labels_named("no such label") == service.labels_named("3") == {}


# What each stage tells the autoscaling policy of itself.


@pytest.fixture
def settings(tiny_set) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=None, max_concurrent_requests=1)


def told(usage: Usage) -> tuple[float, ...]:
    """Images that arrived, were done, are there."""
    figures = usage.figures()
    return tuple(figures[f"images_{what}"] for what in ("arrived", "done", "waiting"))


async def test_every_stage_counts_its_images(settings):
    images = np.zeros((3, SIZE, SIZE, 3), np.uint8)
    decoder, combiner = DecoderReplica(settings), CombinerReplica(settings)
    classifier = ClassifierReplica(settings, "sure")
    await decoder.decode([picture(), b"no image"])
    await combiner.combine({"sure": (await classifier.classify(images, 10.0)).probabilities}, 1)
    assert told(decoder.usage) == (2, 2, 0)
    assert told(classifier.usage) == told(combiner.usage) == (3, 3, 0)
    for replica in (decoder, classifier, combiner):
        assert replica.record_autoscaling_stats() == pytest.approx(replica.usage.figures(), rel=0.1)


async def test_the_gateway_counts_refused_ones_too_and_no_probe(settings):
    members = {"sure": fakes.FakeMember((0.1, 0.8, 0.1))}
    service = fakes.service_of(settings, fakes.FakeDecoder(), members, fakes.FakeCombiner())
    with service.admission.admit(), pytest.raises(errors.OverloadedError):
        service.admission.admit().__enter__()
    await service.classify(ClassifyRequest([b"good", b"good"], 1, 10.0, "id", RequestObserver()))
    await service.check_ready()
    assert told(service.usage) == (3, 2, 0)


async def test_a_forwarded_request_is_admitted_counted_and_timed_as_any_other(settings):
    member = fakes.FakeMember((0.1, 0.8, 0.1))
    service = fakes.service_of(
        settings, fakes.FakeDecoder(), {"sure": member}, fakes.FakeCombiner()
    )
    request = ClassifyRequest([b"good", b"good"], 1, 0.05, "id", RequestObserver())
    assert len(await service.handle_forwarded(request.forwarded())) == 2
    assert told(service.usage) == (2, 2, 0)
    with service.admission.admit(), pytest.raises(errors.OverloadedError):
        await service.handle_forwarded(request.forwarded())
    member.gate = asyncio.Event()  # it hangs
    with pytest.raises(errors.DeadlineError):
        await service.handle_forwarded(request.forwarded())
    assert told(service.usage)[2] == 0


def test_a_gateway_with_all_stages_expects_their_sum(settings):
    together = assemble(settings).service
    apart = Settings(**settings.model_dump() | {"decoder": "deployment", "members": "deployment"})
    alone = assemble(
        apart, fakes.handle_of(fakes.FakeDecoder()), {"sure": fakes.handle_of(fakes.FakeMember())}
    ).service
    costs = [service.usage.figures()["expected_cpu_ms"] for service in (together, alone)]
    assert costs[0] > 40 > 10 > costs[1]  # two members without a record: 20 each
    assert alone.usage.figures()["cores"] == 1


def test_serve_finds_the_figures_of_the_ingress_too(settings):
    """``serve.ingress`` wraps the Gateway: the method must still be there."""
    assert callable(build(settings)._bound_deployment.func_or_class.record_autoscaling_stats)


# The version of the set that answers: the same in answers, in what is served, metrics, traces.


@pytest.mark.parametrize("cache", ["none", "local"])
async def test_answers_computed_or_kept_say_which_version(tiny_set, cache, told):
    settings = Settings(model_set=str(tiny_set), cache=cache)
    members = {"sure": fakes.FakeMember(), "unsure": fakes.FakeMember()}
    service = fakes.service_of(settings, fakes.FakeDecoder(), members, Combiner(settings))
    version = load_model_set(str(tiny_set)).fingerprint()
    for _ in range(2):
        request = ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver())
        (answer,) = await service.classify(request)
        assert isinstance(answer, Classified)
        assert answer.model_version == version
        assert reply_of([answer], "id").results[0].classified.model_version == version
    assert service.served_models().model_version == version
    assert {tags[-1] for tags in told.of(ANSWERS)} == {version}


async def over_http(graph, plan):
    query = f"?plan={plan}" if plan else ""
    answer = await client_of(graph).post(f"/v1/classify{query}", content=IMAGE)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def over_v2(graph, plan):
    sent = images(IMAGE, parameters={"plan": plan} if plan else {})
    told = (await infer(client_of(graph), sent)).json()["parameters"]
    return told | {"asked": told.get("asked", "").split(", ")}


async def over_grpc(graph, plan):
    message = messages.ClassifyRequest(images=[IMAGE], plan=plan).SerializeToString()
    reply = await GrpcInterface(graph.service).classify(stream_of(message), context_of())
    return MessageToDict(reply.results[0].classified)


@pytest.mark.parametrize("ask", [over_http, over_v2, over_grpc])
async def test_a_service_that_is_nearly_full_answers_by_the_fast_plan(ask, told):
    graph = Graph(when_full="fast", max_concurrent_requests=4)
    graph.members["densenet169"].row = [0.0, 1.0, *[0.0] * 8]
    admission = graph.service.admission
    with ExitStack() as others:
        for _ in range(3):
            assert "reason" not in await ask(graph, None)
            others.enter_context(admission.admit())
        loaded = await ask(graph, None)
        assert (loaded["plan"], loaded["reason"]) == ("fast", "load")
        assert loaded["asked"] == ["densenet169"]
        full = await ask(graph, "full")  # what a request asks for itself holds
        assert full.get("plan", "full") == "full"
        assert "reason" not in full
        fast = await ask(graph, "fast")
        assert fast["plan"] == "fast"
        assert "reason" not in fast
    assert told.of(PLAN_STEPS) == {
        ("full", "2", "none"): 4,
        ("fast", "1", "load"): 1,
        ("fast", "1", "none"): 1,
    }


async def test_otherwise_it_answers_by_every_member_until_it_is_full():
    graph = Graph(max_concurrent_requests=4)
    with ExitStack() as others:
        for _ in range(3):
            others.enter_context(graph.service.admission.admit(CLIENT))
        assert (await over_http(graph, None))["plan"] == "full"
        others.enter_context(graph.service.admission.admit(CLIENT))
        assert (await client_of(graph).post("/v1/classify", content=IMAGE)).status_code == 429
