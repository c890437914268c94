"""Ladders for tests: jobs of tiny sets, results as short as they can be written, fake processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration.commands.ladder import LadderOptions, plan
from calibration.ladder.rungs import Figures, LadderJob, RungNetwork, RungOptions, RungResult
from tests.support.tiny_networks import SIZE


def job_of(network: object, work: Path, **asked: Any) -> LadderJob:
    return plan(LadderOptions(str(network), work=work, seconds=0.05, **asked), work)


def measured(rate: float, chosen: RungOptions | None = None, **figures: Any) -> RungResult:
    """A rung that gave ``rate`` images/s."""
    facts: dict[str, Any] = {
        "images_per_s": rate,
        "p50_ms": 1.0,
        "cpu_ms_per_image": 2.0,
        "utilisation": 0.9,
        "utilisation_spread": 0.05,
        "pss_mib": 100.0,
        "rss_mib": 120.0,
        "num_images": 100,
        "seconds": 1.0,
    }
    return RungResult(
        outcome="measured",
        chosen=chosen or RungOptions(),
        figures=Figures(**facts | figures),
        prepared_s=1.0,
    )


def tiny_job(folder: Path, work: Path, *, cores: int = 1, **asked: Any) -> LadderJob:
    """A job for the first member of a tiny set, without rungs of its own."""
    network = RungNetwork(
        name="sure", size=SIZE, num_classes=3, model_set=folder, torch_source="none"
    )
    return LadderJob(
        network, (), work, {}, cores=cores, **{"seconds": 0.1, "max_images": 0} | asked
    )


class FakeProcesses:
    """Runs no process: answers by name, and keeps the choices by name."""

    def __init__(self, answers: dict[str, RungResult | BaseException | None] | None = None) -> None:
        self.answers = answers or {}
        self.tasks: dict[str, Sequence[RungOptions]] = {}

    def __call__(self, job, name, engine, choices, say):
        self.tasks[name] = choices
        say("measuring")
        answer = self.answers.get(name)
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        if name.startswith("prepare-"):
            return RungResult(outcome="prepared")
        return measured(10.0, choices[0])
