"""Runs a ladder's rungs one after another, each once; earlier results are kept."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from calibration.ladder.job import LadderJob
from calibration.ladder.process import Say, run_task
from calibration.ladder.rung import LadderError, RungOptions, RungResult, RungTask
from calibration.ladder.rungs import SERVICE, Rung
from calibration.ladder.service import run_service_rung
from calibration.ladder.store import Store
from models.errors import TandemError

OVERHEAD_S = 15.0  # of a rung in addition to measuring, before a rung was seen
MADE_ONCE = "prepare-"  # prefix of the results of preparations


RunTask = Callable[[Store, str, RungTask, Say], RungResult]  # runs a task in a new process
RunService = Callable[[LadderJob, Store, float | None], RungResult]


@dataclass(frozen=True)
class LadderStep:
    """The progress of a ladder."""

    number: int
    of: int
    rung: Rung
    doing: str
    left_s: float


class Runner:
    """Runs a ladder; functions that start processes are parameters, so that tests replace them."""

    def __init__(
        self,
        job: LadderJob,
        store: Store,
        report: Callable[[LadderStep], None] = lambda _: None,
        run: RunTask = run_task,
        run_service: RunService = run_service_rung,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._store, self._report = job, store, report
        self._run, self._run_service, self._clock = run, run_service, clock
        self._results: dict[str, RungResult] = {}
        self._took_s: list[float] = []

    def run(self) -> Mapping[str, RungResult]:
        """Return every rung's result, in the ladder's order.

        Raises:
            LadderError: the network cannot be made, or the labelled images cannot be used.

        """
        job = self._job
        pending = [rung for rung in job.rungs if self._store.read(rung.name) is None]
        if any(rung.name not in job.impossible for rung in pending):
            self._prepare_network(pending[0])
        for number, rung in enumerate(job.rungs, start=1):
            kept = self._store.read(rung.name)
            if kept is None:
                kept = self._measure(rung, number)
                self._store.write(rung.name, kept)
            self._results[rung.name] = kept
        if not any(result.outcome == "failed" for result in self._results.values()):
            self._store.remove_networks()
        return self._results

    def _prepare_network(self, first: Rung) -> None:
        """Make the inputs of every rung: the network with random weights, the labelled pixels."""
        job = self._job
        whole = (["make_set"] if job.network.is_random else []) + (
            ["labelled"] if job.asked.images is not None else []
        )
        for engine in whole:
            doing = "making the network" if engine == "make_set" else "reading the labelled images"
            self._report(LadderStep(1, len(job.rungs), first, doing, self._left_s(1)))
            if reason := self._not_prepared(engine, lambda _: None):
                raise LadderError(reason)

    def _not_prepared(self, engine: str, say: Say) -> str:
        """Make a preparation unless it exists; return why it failed, or ""."""
        name = f"{MADE_ONCE}{engine}"
        if self._store.read(name) is not None:
            return ""
        result = self._run(self._store, name, self._job.task(engine), say)
        if result.outcome != "prepared":
            return result.reason
        self._store.write(name, result)
        return ""

    def _measure(self, rung: Rung, number: int) -> RungResult:
        """Run a rung; an error becomes its result."""
        if why := self._job.impossible.get(rung.name):
            return RungResult(outcome="skipped", reason=why)
        started = self._clock()

        def say(doing: str) -> None:
            of = len(self._job.rungs)
            self._report(LadderStep(number, of, rung, doing, self._left_s(number)))

        say("starting")
        try:
            result = self._outcome(rung, say)
        except TandemError as error:
            result = RungResult(outcome="failed", reason=error.message)
        if result.outcome == "measured":
            self._took_s.append(self._clock() - started)
        return result

    def _outcome(self, rung: Rung, say: Say) -> RungResult:
        if rung.name == SERVICE or rung.engine is None:
            return self._run_service(self._job, self._store, self._cascade_margin())
        for engine in rung.needs:
            say(f"preparing: {engine}")
            if reason := self._not_prepared(engine, say):
                return RungResult(outcome="skipped", reason=reason)
        task = self._job.task(rung.engine, rung.choices(self._base(rung)))
        return self._run(self._store, rung.name, task, say)

    def _base(self, rung: Rung) -> RungOptions:
        """Return the options of the fastest earlier rung of the same engine."""
        best, options = 0.0, RungOptions()
        for before in self._job.rungs:
            result = self._results.get(before.name)
            if before.engine != rung.engine or result is None or result.figures is None:
                continue
            if result.figures.images_per_s > best:
                best, options = result.figures.images_per_s, result.chosen
        return options

    def _cascade_margin(self) -> float | None:
        """Return the cascade rung's margin for the service; None if it was not measured."""
        cascade = self._results.get("cascade")
        if cascade is None or cascade.outcome != "measured":
            return None
        return cascade.chosen.cascade_margin

    def _left_s(self, number: int) -> float:
        """Estimate the time from the start of the ``number``-th rung to the end."""
        coming = self._job.rungs[number - 1 :]
        num_pending = sum(
            rung.name not in self._job.impossible and self._store.read(rung.name) is None
            for rung in coming
        )
        mean_s = (
            sum(self._took_s) / len(self._took_s)
            if self._took_s
            else self._job.asked.seconds + OVERHEAD_S
        )
        return num_pending * mean_s
