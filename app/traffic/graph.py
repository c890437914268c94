"""The graph of several versions of a set: one answers each request, others may get a copy.

The photo or a header decides which version answers, so that repeated requests get the same one.
The shadow gets copies of the main version's requests. For a sample of requests the canary and the
main version both get the photos, so that they are compared on the same ones.

Copies wait until clients leave the machine idle, and have a small share of the compute even if they
never do (:class:`ShadowLane`). Their number is bounded: further copies are dropped, and so are
copies that did not begin in time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Literal

from app.answers import Classified, Fault, cpu_ms
from app.errors import (
    IN_A_SECOND,
    DeadlineError,
    HeavyFileError,
    NotReadyError,
    OverloadedError,
    UnhealthyError,
    UnknownModelError,
)
from app.graph.availability import Graph, run_in_time
from app.graph.request import ClassifyRequest, RequestAnswers, TensorRequest
from app.queueing.scheduler import SHADOW, BatchScheduler
from app.telemetry.metric_table import (
    TRAFFIC_COMPARED,
    TRAFFIC_COPIES,
    TRAFFIC_SHARE,
    TRAFFIC_VARIATION,
)
from app.telemetry.metrics import RequestObserver, meter
from app.telemetry.spans import untraced_task
from app.traffic.plan import (
    Disagreement,
    Figures,
    Plan,
    choice_of,
    chosen,
    distance,
    in_words,
    sticky_key,
)
from models.ensemble import AnswerRule
from models.errors import TandemError

MAX_COPIED_FILES = 8  # of one request
logger = logging.getLogger("ray.serve")
MAX_IMAGES, MAX_BYTES = 16, 64 * 2**20  # under way at a time: images, and bytes of their files
COPY_TIME_S = 10.0  # how long a copy waits for its turn at most, and the time limit of its turn
MAX_DUE = 2.0  # images that the share covers at most, so that no burst follows a pause
LOOK_EVERY_S = 0.002  # at least between two looks whether a copy may begin
UNUSED_EVERY_S = 0.05  # how often a version that is unloaded is checked for requests under way
LAST_COPY_SHARE = 0.05  # the weight of the last copy in the moving average of a copy's cost
# A copy that ends with one of these was dropped; the version did not fail.
DROPPED = (DeadlineError, OverloadedError, HeavyFileError)
Ended = Callable[[RequestAnswers | Exception], None]
CopyResult = Literal["computed", "dropped", "failed"]


class TrafficGraph:
    """Sends each request to one of several versions.

    Args:
        versions: graphs by NAME@FINGERPRINT, each with its own cache if the settings ask for one.
        plan: which of them answer, and who is the shadow.
        compare_ratio: the share of requests that a canary and the main version both get.
        rule_of: returns the rule by which a version's probabilities become labels.
        places: returns, for a reference and a version, the version's index of each of the
            reference's classes; None if both have the same order.
        lane: in which all versions' copies wait; None: one of its own, without guaranteed copies.
    """

    def __init__(
        self,
        versions: Mapping[str, Graph],
        plan: Plan,
        compare_ratio: float,
        rule_of: Callable[[str], AnswerRule],
        places: Callable[[str, str], Sequence[int] | None] = lambda _, __: None,
        lane: "ShadowLane | None" = None,
    ) -> None:
        self.versions = dict(versions)
        self.plan = plan
        self.figures = Figures()
        # Called with a photo that two versions disagree on, the answer, the copy's, and its place.
        self.on_disagreement: Callable[[bytes, Classified, Classified, int], None] = lambda *_: None
        self.on_copy: Callable[[Classified], None] = lambda _: None  # called with a copy's answer
        self.on_main: Callable[[], None] = lambda: None  # called when another version is the main
        self._compare_ratio, self._rule_of, self._places = compare_ratio, rule_of, places
        self._lane = lane or ShadowLane(None, 0.0)
        self._running: Counter[Graph] = Counter()  # requests under way
        self._due = 0.0  # grows by the ratio with each request; at 1 a comparison is due
        self._canaries: Iterator[str] = iter(())
        self.take(plan)

    def take(self, plan: Plan) -> None:
        """Serve by another plan from now on; requests under way keep their version.

        Raises :class:`KeyError` if the plan names a version that is not loaded.
        """
        for name in plan.split.versions:
            _ = self.versions[name]
        before, self.plan = self.plan, plan
        canaries = [name for name in plan.split.answering if name != plan.split.main]
        self._canaries = cycle(canaries) if canaries else iter(())
        self._lane.retry()
        if plan.split.main != before.split.main:
            self.on_main()
        for name in self.versions:
            share = plan.split.shares.get(name, 0.0)
            meter.set(TRAFFIC_SHARE, share, model_version=_version_of(name))

    async def run(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer all files of a request with one version; raises what its graph raises."""
        name = self._chosen(request)
        others = [] if request.is_probe else self._to_compare(name, request)
        if not others:
            return self._ordered(name, request, await self._answered(name, request))
        asked = request._replace(tensors=request.tensors or TensorRequest())
        answers = await self._answered(name, asked)
        for other in others:
            if other in self.versions:  # it may have been removed meanwhile
                self._copy(name, other, request, answers)
        if request.tensors is None:
            return list(map(_plain, answers))
        return self._ordered(name, request, answers)

    def _ordered(
        self, name: str, request: ClassifyRequest, answers: RequestAnswers
    ) -> RequestAnswers:
        """Return a version's answers with rows in the order of classes that the request goes by."""
        wanted = None if request.tensors is None else request.tensors.classes_of
        other = next((n for n in self.versions if wanted and n.endswith(wanted)), name)
        if other == name or (places := self._places(other, name)) is None:
            return answers
        return [
            replace(answer, probabilities=answer.probabilities[places])
            if isinstance(answer, Classified)
            else answer
            for answer in answers
        ]

    def _chosen(self, request: ClassifyRequest) -> str:
        split = self.plan.split
        version = None if request.tensors is None else request.tensors.version
        if not (request.is_probe or request.is_of_files):
            # Its pixels and member were checked against the version that was main when it arrived.
            checked_for = None if request.tensors is None else request.tensors.classes_of
            version = version or checked_for
        if version is not None:
            if (name := next((n for n in self.versions if n.endswith(version)), None)) is not None:
                return name
            gone = f"version {version} has just been unloaded"
            if request.tensors is None or request.tensors.version is None:
                raise NotReadyError(f"{gone}; {IN_A_SECOND}")
            raise UnknownModelError(f"{gone}: name another")
        if request.is_probe or not request.is_of_files or request.embedding is not None:
            return split.main  # its input size and its members' names are those that clients see
        if len(split.answering) == 1:
            return split.main
        return chosen(sticky_key(request.traffic_key, request.files[0]), split.shares)

    async def _answered(self, name: str, request: ClassifyRequest) -> RequestAnswers:
        """Answer with a version, and count the answers or the failure."""
        if request.is_probe:
            return await self._run(name, request)
        figures, started = self.figures.of_version(name), request.observer.elapsed_ms()
        try:
            answers = await self._run(name, request)
        except asyncio.CancelledError:
            if request.left_s <= 0:  # out of time; otherwise the client hung up
                figures.failed += request.num_images
            raise
        except Exception as error:
            if not isinstance(error, TandemError) or error.status >= 500:
                figures.failed += request.num_images
            raise
        figures.note_answers(answers, request.observer.elapsed_ms() - started)
        self._lane.answered(answers)
        return answers

    async def _run(self, name: str, request: ClassifyRequest) -> RequestAnswers:
        graph = self.versions[name]
        self._running[graph] += 1
        try:
            return await graph.run(request)
        finally:
            self._running[graph] -= 1

    async def unused(self, graph: Graph) -> None:
        """Return once no request or copy uses a version that was taken out of ``versions``."""
        while self._running[graph] or self._lane.uses(graph):
            await asyncio.sleep(UNUSED_EVERY_S)
        del self._running[graph]

    def _to_compare(self, name: str, request: ClassifyRequest) -> list[str]:
        """Return the versions that get a copy of a request that ``name`` answers."""
        split = self.plan.split
        if not request.is_of_files:
            return []
        others = [split.shadow] if split.shadow is not None and name == split.main else []
        if len(split.answering) > 1 and self._is_due():
            others.append(next(self._canaries) if name == split.main else split.main)
        return [other for other in others if self._has_room(other, request)]

    def _is_due(self) -> bool:
        """Whether this request is compared; ``compare_ratio`` of all requests are."""
        self._due += self._compare_ratio
        if self._due < 1:
            return False
        self._due -= 1
        return True

    def _has_room(self, other: str, request: ClassifyRequest) -> bool:
        files = request.files[:MAX_COPIED_FILES]
        if self._lane.has_room(self.versions[other], files):
            return True
        self._count(other, "dropped", len(files))
        return False

    def _count(self, other: str, result: CopyResult, number: int = 1) -> None:
        """Count copies of photos for a version."""
        figures = self.figures.of_version(other)
        match result:
            case "computed":
                figures.copies += number
            case "dropped":
                figures.dropped += number
            case "failed":
                figures.copies_failed += number
        meter.count(TRAFFIC_COPIES, number, model_version=_version_of(other), result=result)

    def _copy(
        self, name: str, other: str, request: ClassifyRequest, answers: RequestAnswers
    ) -> None:
        """Send ``other`` the files of a request that ``name`` answered, and compare the answers."""
        # The main version is the reference, whichever of the two answered the client.
        originals = [
            (place, request.files[place], answer)
            for place, answer in enumerate(answers[:MAX_COPIED_FILES])
            if isinstance(answer, Classified) and not answer.degraded
        ]
        files = [file for _, file, _ in originals]
        if not files or not self._has_room(other, request):
            return
        main, of_request = self.plan.split.main, request.request_id
        is_reversed = other == main

        def ended(outcome: RequestAnswers | Exception) -> None:
            if isinstance(outcome, Exception):
                is_dropped = isinstance(outcome, DROPPED)
                self._count(other, "dropped" if is_dropped else "failed", len(files))
                return
            for (place, file, answer), copy in zip(originals, outcome, strict=True):
                if not isinstance(copy, Classified) or copy.degraded:
                    self._count(other, "failed")
                    continue
                self._count(other, "computed")
                self.figures.of_version(other).computed_image(copy)
                self._lane.computed(copy)
                self.on_copy(copy)
                pair = (main, name, copy, answer) if is_reversed else (name, other, answer, copy)
                if not self._compare(*pair, (of_request, place)):
                    self.on_disagreement(file, answer, copy, place)

        self._lane.ask(self.versions[other], request._replace(files=files, embedding=None), ended)

    def _compare(
        self,
        reference: str,
        version: str,
        first: Classified,
        second: Classified,
        where: tuple[str, int],
    ) -> bool:
        """Count how the answers to a photo differ; return whether the versions agree.

        ``where`` is the request and the file.
        """
        rule, row, other_row = self._rule_of(reference), first.probabilities, second.probabilities
        places = self._places(reference, version) or range(len(row))
        apart = distance(row, other_row[places], is_multi_label=rule.is_multi_label)
        choice, other = choice_of(row, rule), choice_of(other_row, self._rule_of(version))
        disagreement = None
        if {places[index] for index in choice} != other.keys():
            disagreement = Disagreement(*where, [in_words(choice), in_words(other)])
        self.figures.of_pair(reference, version).note(apart, disagreement)
        fingerprint, agreed = _version_of(version), "yes" if disagreement is None else "no"
        meter.count(TRAFFIC_COMPARED, model_version=fingerprint, agreed=agreed)
        meter.count(TRAFFIC_VARIATION, apart, model_version=fingerprint)
        return disagreement is None


def _version_of(name: str) -> str:
    return name.rpartition("@")[2]


def _plain(answer: Classified | Fault) -> Classified | Fault:
    """Return an answer without its row of probabilities, as clients who send files get it."""
    return answer if isinstance(answer, Fault) else replace(answer, probabilities=None)


class ShadowLane:
    """The copies that one process holds, of which one at a time is computed; for one event loop.

    A copy begins in one of two ways:

    - Clients have left the machine idle for as long as the copy takes, and will probably leave it
      idle as long again (:class:`app.queueing.scheduler.Pauses`). Right behind an answer it would
      delay the next request of the same client.
    - Copies are guaranteed a ``share`` of the compute that answers take. Each answer adds to
      ``_num_due`` the images that its share pays for, at the mean cost of a copy's image. At 1 a
      copy is due: its batches and those of clients take turns.
    """

    def __init__(self, scheduler: BatchScheduler | None, share: float) -> None:
        self._scheduler, self._share = scheduler or BatchScheduler(), share
        self._num_bytes = 0
        self._tasks: dict[asyncio.Task[None], Graph] = {}
        self._hanging: set[Graph] = set()
        self._turns: dict[asyncio.Event, int] = {}  # images of each copy; its turn is set to begin
        self._running: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_due = 0.0
        self._num_computed = 0
        self._image_ms = 0.0  # mean CPU time of a copy's image; before any, of an answer's

    def has_room(self, graph: Graph, files: list[bytes]) -> bool:
        """Whether copies of these files may be sent to a graph now."""
        return (
            graph not in self._hanging
            and sum(self._turns.values()) + len(files) <= MAX_IMAGES
            and self._num_bytes + sum(map(len, files)) <= MAX_BYTES
        )

    def uses(self, graph: Graph) -> bool:
        """Whether copies are under way at a graph that gets no more; then it may end."""
        self._hanging.discard(graph)
        return graph in self._tasks.values()

    def retry(self) -> None:
        """Send copies again to graphs that hung before, and pay for none by answers of before."""
        self._hanging.clear()
        self._num_due = min(self._num_due, 0.0)

    def ask(self, graph: Graph, request: ClassifyRequest, ended: Ended) -> None:
        """Send a copy to a graph; ``ended`` is called on the loop with the answers or the error."""
        turn, num_bytes = asyncio.Event(), sum(map(len, request.files))
        self._turns[turn] = len(request.files)
        self._num_bytes += num_bytes
        task = untraced_task(self._run(graph, request, turn, ended))

        def over(_: asyncio.Task[None]) -> None:
            del self._tasks[task], self._turns[turn]
            self._num_bytes -= num_bytes
            if turn is self._running:
                self._running, self._scheduler.copy_is_due = None, False
                self._give_turn()
            if task.cancelled():  # behind one that hangs
                ended(UnhealthyError("the version hangs"))

        self._tasks[task] = graph  # a reference, so that the task is not garbage-collected
        task.add_done_callback(over)
        self._give_turn()

    def answered(self, answers: RequestAnswers) -> None:
        """Let answers to clients pay for copies by the share of their compute."""
        for answer in answers:
            if isinstance(answer, Classified) and (used_ms := cpu_ms(answer, 1)):
                self._image_ms = self._image_ms or used_ms
                more = self._share * used_ms / self._image_ms
                self._num_due = min(MAX_DUE, self._num_due + more)
        if self._num_due >= 1:
            self._give_turn()

    def computed(self, copy: Classified) -> None:
        """Include an image of a copy in the mean cost."""
        self._num_computed += 1
        weight = max(LAST_COPY_SHARE, 1 / self._num_computed)
        self._image_ms += weight * (cpu_ms(copy, 1) - self._image_ms)

    def _give_turn(self) -> None:
        """Let the copy that has waited longest begin, or look again when it may."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running is None and self._turns:
            loop, (turn, num_images) = asyncio.get_running_loop(), next(iter(self._turns.items()))
            takes_s = num_images * self._image_ms / 1e3
            if self._num_due < 1:
                if not self._scheduler.pauses.has_room_for(takes_s, loop.time()):
                    self._timer = loop.call_later(max(takes_s / 2, LOOK_EVERY_S), self._give_turn)
                    return
                self._num_due = min(self._num_due, 0.0)  # comparisons come without the share
            self._running = turn
            turn.set()
        # A copy that clients have overtaken becomes due too, or it would keep the only turn.
        if self._running and self._num_due >= 1 and not self._scheduler.copy_is_due:
            self._scheduler.copy_is_due = True
            self._num_due -= self._turns[self._running]

    async def _run(
        self, graph: Graph, request: ClassifyRequest, turn: asyncio.Event, ended: Ended
    ) -> None:
        outcome: RequestAnswers | Exception
        try:
            async with asyncio.timeout(COPY_TIME_S):
                await turn.wait()
            # As a probe, which neither the cache nor other Gateways answer.
            copy = request._replace(
                timeout_s=COPY_TIME_S, observer=RequestObserver(), is_probe=True
            )
            copy = copy._replace(lane=SHADOW, tensors=TensorRequest(), has_set=False)
            outcome = await run_in_time(graph, copy)
        except TimeoutError:
            outcome = DeadlineError(f"the copy had no turn within {COPY_TIME_S:g} s")
        except Exception as error:
            outcome = error
            if isinstance(error, UnhealthyError):
                self._leave_alone(graph)
                logger.error("%s; its version gets no copies until the plan changes", error.message)
            elif not isinstance(error, TandemError):
                logger.exception("a copy in the shadow lane failed")
        ended(outcome)

    def _leave_alone(self, graph: Graph) -> None:
        """Send a hanging graph no more copies, and cancel those that wait for it."""
        self._hanging.add(graph)
        for task, of in self._tasks.items():
            if of is graph and task is not asyncio.current_task():
                task.cancel()
