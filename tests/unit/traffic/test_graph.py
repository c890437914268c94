"""The graph of versions: one version a request, copies for the others, plain answers."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.answers import Classified, Fault, StageTiming, Timings
from app.errors import BadTensorError, DeadlineError, OverloadedError, UnhealthyError
from app.graph.availability import run_in_time
from app.graph.request import ClassifyRequest, RequestAnswers, TensorRequest
from app.telemetry.metrics import RequestObserver
from app.traffic.graph import MAX_IMAGES, TrafficGraph
from app.traffic.plan import Disagreement, Plan, Split, chosen, sticky_key
from models.ensemble import AnswerRule, Prediction
from tests.support.answers import answer_of
from tests.support.cases import cases

A, B, C = "tiny@aaaaaaaaaaaa", "tiny@bbbbbbbbbbbb", "tiny@cccccccccccc"
NO_IMAGE = Fault(400, "not_an_image", "no image")
SURE = np.array([0.8, 0.2], np.float32)


class Version:
    """Answers every file with one class; ``waits`` holds its answers, ``raises`` fails them."""

    def __init__(self, name: str, row: np.ndarray = SURE) -> None:
        self.name, self.row, self.is_degraded = name, row, False
        self.requests: list[ClassifyRequest] = []
        self.waits: asyncio.Future | None = None
        self.raises: Exception | None = None

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        self.requests.append(request)
        if self.raises is not None:
            raise self.raises
        if self.waits is not None:
            await asyncio.shield(self.waits)
        return [NO_IMAGE if f == b"bad" else self._answer(request) for f in request.files or [b""]]

    def _answer(self, request: ClassifyRequest) -> Classified:
        index = int(self.row.argmax())
        prediction = Prediction(index, f"class {index}", float(self.row[index]))
        infer = [StageTiming("infer", 1.0, 8.0, "m", 4), StageTiming("infer", 1.0, 6.0, "n", 2)]
        return replace(
            answer_of(),
            model_version=self.name.rpartition("@")[2],
            predictions=[prediction],
            degraded=self.is_degraded,
            request_id=request.request_id,
            timings_ms=Timings(9.0, [StageTiming("decode", 0.0, 1.0), *infer]),
            probabilities=None if request.tensors is None else self.row,
        )


def asked(data: bytes = b"photo", *more: bytes, **changes: Any) -> ClassifyRequest:
    request = ClassifyRequest([data, *more], 1, 10.0, "r", RequestObserver())
    return request._replace(**changes)


def graph_of(
    split: Split, *versions: Version, compare_ratio: float = 0.0, **thresholds: float
) -> TrafficGraph:
    """Return a graph; ``thresholds`` are those of multi-label versions, by a, b and c."""
    graphs = {version.name: version for version in versions}

    def rule_of(name: str) -> AnswerRule:
        return AnswerRule(("class 0", "class 1"), thresholds.get(name[5]))

    return TrafficGraph(graphs, Plan.first(split), compare_ratio, rule_of)


class Shadowed:
    """A version that answers, and a shadow of it."""

    def __init__(self, shadow_row: np.ndarray = SURE, **thresholds: float) -> None:
        self.main, self.shadow = Version(A), Version(C, shadow_row)
        self.graph = graph_of(Split({A: 100.0}, C), self.main, self.shadow, **thresholds)
        self.figures, self.of_main = (self.graph.figures.of_version(name) for name in (C, A))
        self.pairs = self.graph.figures.pairs

    async def answer(self, *files: bytes, **changes: Any) -> RequestAnswers:
        """Answer a request, and let its copies end."""
        answers = await self.graph.run(asked(*files or [b"photo"], **changes))
        await settle(self.graph)
        return answers


@pytest.fixture
def shadowed() -> Shadowed:
    return Shadowed()


async def settle(graph: TrafficGraph) -> None:
    """Let the copies that are under way end."""
    await asyncio.gather(*graph._lane._tasks, return_exceptions=True)
    await asyncio.sleep(0)


async def test_one_version_answers_a_request_and_always_the_same() -> None:
    first, second = Version(A), Version(B)
    graph = graph_of(Split({A: 50.0, B: 50.0}), first, second)
    versions: Counter[str] = Counter()
    for number in range(200):
        data = b"%d" % number
        of = {(await graph.run(asked(data)))[0].model_version for _ in range(3)}
        assert len(of) == 1
        versions.update(of)
    assert set(versions) == {A[-12:], B[-12:]}
    assert min(versions.values()) > 60
    assert len(first.requests) + len(second.requests) == 600


async def test_a_header_keeps_a_caller_at_a_version() -> None:
    graph = graph_of(Split({A: 50.0, B: 50.0}), Version(A), Version(B))
    answers = [await graph.run(asked(b"%d" % n, traffic_key="anna")) for n in range(50)]
    assert len({answer.model_version for (answer,) in answers}) == 1


@cases(
    "changes",
    {"is_probe": True},
    {"tensors": TensorRequest(member="m")},
    {"tensors": TensorRequest(pixels=np.zeros((1, 2, 2, 3), np.uint8)), "files": []},
)
async def test_probes_members_and_pixels_are_the_main_versions(changes: dict) -> None:
    main, other, shadow = Version(A), Version(B), Version(C)
    graph = graph_of(Split({A: 60.0, B: 40.0}, C), main, other, shadow, compare_ratio=1.0)
    for number in range(40):
        await graph.run(asked(b"%d" % number, **changes))
    await settle(graph)
    assert (len(main.requests), other.requests, shadow.requests) == (40, [], [])


async def test_pixels_on_their_way_are_answered_by_the_version_that_they_were_checked_for() -> None:
    """The other one may have another input size, or lack the member."""
    main, other = Version(A), Version(B)
    graph = graph_of(Split({A: 100.0}, B), main, other)
    graph.take(graph.plan.changed(graph.plan.split.promoted(B)))
    for of in ({"pixels": np.zeros((1, 2, 2, 3), np.uint8)}, {"member": "m"}):
        tensors = TensorRequest(classes_of=A[-12:], **of)
        await graph.run(asked(tensors=tensors, files=[]))
    assert (len(main.requests), len(other.requests)) == (2, 0)
    await graph.run(asked(tensors=TensorRequest(classes_of=A[-12:])))  # a photo fits both
    assert len(other.requests) == 1


async def test_a_version_that_is_asked_for_answers() -> None:
    graph = graph_of(Split({A: 50.0, B: 50.0}), Version(A), Version(B))
    for number in range(20):
        request = asked(b"%d" % number, tensors=TensorRequest(version=A[-12:]))
        assert (await graph.run(request))[0].model_version == A[-12:]


async def test_the_shadow_sees_a_copy_in_the_lowest_lane_and_the_answer_is_the_mains() -> None:
    shadowed = Shadowed(SURE[::-1])
    (answer,) = await shadowed.answer()
    assert answer.probabilities is None  # as plain as without a shadow
    assert answer.model_version == A[-12:]
    (copy,) = shadowed.shadow.requests
    assert (copy.lane, copy.is_probe, copy.files) == ("shadow", True, [b"photo"])
    (pair,) = shadowed.pairs.values()
    assert (pair.compared, pair.agreed, pair.variation) == (1, 0, pytest.approx(0.6))
    assert pair.disagreements == [Disagreement("r", 0, ["class 0", "class 1"])]
    figures = shadowed.figures
    assert (figures.answered, figures.copies) == (0, 1)
    assert figures.compute_ms == 8 / 4 + 6 / 2
    assert (figures.work_ms, figures.batch_images) == (1 + 8, 3)


@pytest.mark.parametrize("plan", ["full", "fast"])
@pytest.mark.parametrize(
    "split", [Split({A: 100.0}, C), Split({A: 50.0, C: 50.0})], ids=["shadow", "canary"]
)
async def test_a_copy_is_answered_by_the_plan_of_its_request(split, plan) -> None:
    main, other = Version(A), Version(C)
    graph = graph_of(split, main, other, compare_ratio=1.0)
    await graph.run(asked(plan=plan))
    await settle(graph)
    requests = [*main.requests, *other.requests]
    assert sorted(request.is_probe for request in requests) == [False, True]
    assert [request.plan for request in requests] == [plan] * 2


@cases(
    "row, thresholds, labels",
    ([0.8, 0.7], {"a": 0.7, "c": 0.7}, ["class 0", "class 0 + class 1"]),
    ([0.8, 0.6], {"a": 0.5, "c": 0.5}, ["class 0", "class 0 + class 1"]),
    ([0.4, 0.3], {"a": 0.5, "c": 0.5}, ["class 0", "no label"]),
    ([0.8, 0.2], {"a": 0.7, "c": 0.1}, ["class 0", "class 0 + class 1"]),
    ([0.7, 0.4], {"a": 0.5, "c": 0.5}, None),
)
async def test_labels_over_the_sets_own_threshold_are_compared(row, thresholds, labels):
    """The fakes list one class each, as of a client with top_k=1, and the same ones."""
    shadowed = Shadowed(np.array(row, np.float32), **thresholds)
    await shadowed.answer(threshold=1.0)
    (pair,) = shadowed.pairs.values()
    assert pair.agreed == (labels is None)
    assert [of.labels for of in pair.disagreements] == ([] if labels is None else [labels])


async def test_tensors_keep_their_rows(shadowed) -> None:
    (answer,) = await shadowed.answer(tensors=TensorRequest())
    assert answer.probabilities.tolist() == SURE.tolist()


async def test_a_bad_file_is_not_copied(shadowed) -> None:
    answers = await shadowed.answer(b"bad", b"good")
    assert answers[0] == NO_IMAGE
    assert [copy.files for copy in shadowed.shadow.requests] == [[b"good"]]
    assert [pair.compared for pair in shadowed.pairs.values()] == [1]


async def test_an_answer_without_a_member_is_not_compared(shadowed) -> None:
    shadowed.main.is_degraded = True
    await shadowed.answer()
    assert shadowed.shadow.requests == []


async def test_a_copy_without_a_member_counts_as_failed(shadowed) -> None:
    shadowed.shadow.is_degraded = True
    await shadowed.answer()
    assert (shadowed.figures.copies, shadowed.figures.copies_failed) == (0, 1)
    assert shadowed.pairs == {}


async def test_a_canary_is_compared_on_a_sample_whoever_answers() -> None:
    main, canary = Version(A), Version(B, SURE[::-1])
    graph = graph_of(Split({A: 50.0, B: 50.0}), main, canary, compare_ratio=0.25)
    for number in range(100):
        await graph.run(asked(b"%d" % number))
        await settle(graph)
    copies = [request for request in main.requests + canary.requests if request.lane == "shadow"]
    assert len(copies) == 25
    pair = graph.figures.of_pair(A, B)
    assert (pair.compared, pair.agreed) == (25, 0)
    # The reference's label comes first, whoever answered.
    assert {tuple(of.labels) for of in pair.disagreements} == {("class 0", "class 1")}
    assert list(graph.figures.pairs) == [f"{A} {B}"]


@pytest.mark.parametrize(("main", "other"), [(A, B), (B, A)])
async def test_photos_that_versions_disagree_on_are_told_with_both_answers(main, other):
    """Whoever answered: the main version, or the canary, which the main version then copies."""
    split = Split({A: 60.0, B: 40.0}, C)  # the shadow agrees with A
    versions = Version(A), Version(B, SURE[::-1]), Version(C)
    graph = graph_of(split, *versions, compare_ratio=1.0)
    kept = []
    graph.on_disagreement = lambda *what: kept.append(what)
    photos = (b"%d" % number for number in range(1000))
    photo = next(data for data in photos if chosen(sticky_key(None, data), split.shares) == main)
    await graph.run(asked(photo, b"bad", b"photo"))
    await settle(graph)
    assert [(image, place) for image, _, _, place in kept] == [(photo, 0), (b"photo", 2)]
    for _, answer, copy, _ in kept:
        assert (answer.model_version, copy.model_version) == (main[-12:], other[-12:])
        assert answer.predictions != copy.predictions


async def test_nobody_waits_for_a_shadow_and_a_bounded_number_is_under_way(shadowed) -> None:
    shadowed.shadow.waits = asyncio.get_running_loop().create_future()
    for _ in range(MAX_IMAGES + 5):
        await shadowed.graph.run(asked())
    assert len(shadowed.shadow.requests) <= MAX_IMAGES
    shadowed.shadow.waits.set_result(None)
    await settle(shadowed.graph)
    assert (shadowed.figures.copies, shadowed.figures.dropped) == (MAX_IMAGES, 5)


@cases(
    "error, num_dropped, num_failed",
    (DeadlineError("late"), 2, 0),  # without a turn
    (OverloadedError("full"), 2, 0),
    (RuntimeError("broken"), 0, 2),
    (BadTensorError("broken"), 0, 2),
)
async def test_a_copy_that_is_not_answered(shadowed, error, num_dropped, num_failed):
    shadowed.shadow.raises = error
    for _ in range(2):
        assert (await shadowed.answer())[0].model_version == A[-12:]
    assert (shadowed.figures.dropped, shadowed.figures.copies_failed) == (num_dropped, num_failed)
    assert shadowed.of_main.failed == 0


async def test_copies_behind_one_that_hangs_have_failed_too(shadowed) -> None:
    """Else a version that hangs would have failed on one photo alone."""
    shadowed.shadow.waits = asyncio.get_running_loop().create_future()
    for number in range(3):
        await shadowed.graph.run(asked(b"%d" % number))
    await asyncio.sleep(0)
    shadowed.shadow.waits.set_exception(UnhealthyError("it hangs"))
    await settle(shadowed.graph)
    assert shadowed.figures.copies_failed == 3


async def test_a_shadow_that_hangs_gets_no_more_photos_until_the_traffic_changes(shadowed) -> None:
    shadowed.shadow.raises = UnhealthyError("it hangs")
    for _ in range(3):
        await shadowed.answer()
    assert len(shadowed.shadow.requests) == 1
    assert shadowed.figures.dropped == 2
    shadowed.graph.take(shadowed.graph.plan.changed(Split({A: 100.0}, C)))
    await shadowed.answer()
    assert len(shadowed.shadow.requests) == 2


async def test_errors_of_the_service_count_and_refusals_do_not(shadowed) -> None:
    for error in (DeadlineError("late"), RuntimeError("broken"), OverloadedError("full")):
        shadowed.main.raises = error
        with pytest.raises(type(error)):
            await shadowed.answer()
    assert shadowed.of_main.failed == 2


async def test_a_request_that_runs_out_of_time_counts_and_a_client_that_goes_does_not(shadowed):
    shadowed.main.waits = asyncio.get_running_loop().create_future()
    with pytest.raises(DeadlineError):
        await run_in_time(shadowed.graph, asked(b"photo", b"more", timeout_s=0.01))
    assert shadowed.of_main.failed == 2
    going = asyncio.create_task(run_in_time(shadowed.graph, asked()))
    await asyncio.sleep(0)
    going.cancel()
    await asyncio.wait([going])
    assert shadowed.of_main.failed == 2


async def test_another_plan_holds_from_the_next_request_on() -> None:
    graph = graph_of(Split({A: 100.0}, B), Version(A), Version(B))
    plan = graph.plan.changed(Split({B: 100.0}))
    graph.take(plan)
    (answer,) = await graph.run(asked())
    assert answer.model_version == B[-12:]
    with pytest.raises(KeyError):
        graph.take(plan.changed(Split({C: 100.0})))
    assert graph.plan == plan
