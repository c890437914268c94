"""The order of a ladder's processes, what each builds on, and what a failure or Ctrl-C leaves."""

from pathlib import Path
from typing import Any

import pytest

from calibration.ladder.job import LadderJob
from calibration.ladder.rung import LadderError, RungOptions, RungResult
from calibration.ladder.runner import LadderStep, Runner
from calibration.ladder.store import Store
from tests.support.calibration.ladders import FakeProcesses, job_of, measured

RANDOM = {"is_random": True, "size": 64}
FAILED = RungResult(outcome="failed", reason="its process died")
SKIPPED = RungResult(outcome="skipped", reason="no compiler")


def run(
    job: LadderJob,
    fakes: FakeProcesses,
    *,
    is_resumed: bool = False,
    steps: list[LadderStep] | None = None,
) -> dict[str, RungResult]:
    store = Store(job.work)
    report = (lambda _: None) if steps is None else steps.append
    with store.opened(job.facts, is_resumed=is_resumed):
        return dict(Runner(job, store, report, fakes, fakes.service, clock=lambda: 0.0).run())


def test_every_rung_in_its_order_after_the_preparations(tmp_path):
    job, fakes = job_of("resnet18", tmp_path, **RANDOM), FakeProcesses()
    results = run(job, fakes)
    assert list(results) == [rung.name for rung in job.rungs]
    asked = list(fakes.tasks)
    assert asked[0] == "prepare-make_set"
    assert asked.index("prepare-export") == asked.index("onnxruntime") - 1
    assert asked.index("prepare-quantize") == asked.index("int8") - 1
    assert results["ensemble"].outcome == "skipped"
    assert "ensemble" not in asked
    assert fakes.margins == [None]  # one network has no cascade


def test_a_rung_builds_on_the_fastest_of_its_engine(tmp_path):
    fast = RungOptions(batch=16, is_inference_mode=True)
    answers: dict[str, Any] = {"batches": measured(99.0, fast), "channels_last": measured(1.0)}
    fakes = FakeProcesses(answers)
    run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    (scripted,) = fakes.tasks["torchscript"].choices
    assert scripted == fast.model_copy(update={"mode": "script"})
    assert all(options.is_inference_mode is False for options in fakes.tasks["openvino"].choices)


def test_what_fails_or_is_skipped_does_not_end_the_ladder(tmp_path):
    fakes = FakeProcesses({"compile": SKIPPED, "streams": FAILED, "prepare-export": SKIPPED})
    results = run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    assert results["compile"] == SKIPPED
    assert results["streams"] == FAILED
    assert results["onnxruntime"].reason == "no compiler"  # what it needs could not be made
    assert "onnxruntime" not in fakes.tasks
    assert results["service"].outcome == "measured"


def test_an_error_of_our_own_is_the_rungs_result(tmp_path):
    fakes = FakeProcesses({"latency": LadderError("no memory")})
    results = run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    assert (results["latency"].outcome, results["latency"].reason) == ("failed", "no memory")


def test_a_network_that_cannot_be_made_ends_it_at_once(tmp_path):
    reason = "torchvision has no classification network 'resnet17'"
    fakes = FakeProcesses({"prepare-make_set": RungResult(outcome="failed", reason=reason)})
    with pytest.raises(LadderError, match="resnet17"):
        run(job_of("resnet17", tmp_path, **RANDOM), fakes)
    assert list(fakes.tasks) == ["prepare-make_set"]


def test_ctrl_c_leaves_what_was_measured_and_resume_goes_on(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)
    first = FakeProcesses({"threads": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run(job, first)
    assert {p.stem for p in (tmp_path / "results").glob("[a-z]*.json")} == {
        "prepare-make_set",
        "eager",
        "inference_mode",
        "batches",
    }
    again = FakeProcesses()
    results = run(job, again, is_resumed=True)
    assert next(iter(again.tasks)) == "threads"
    assert list(results) == [rung.name for rung in job.rungs]


def test_resume_tries_again_what_failed_and_keeps_what_was_skipped(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)
    run(job, FakeProcesses({"streams": FAILED, "compile": SKIPPED}))
    again = FakeProcesses()
    assert run(job, again, is_resumed=True)["streams"].outcome == "measured"
    assert set(again.tasks) == {"streams"}


def test_without_resume_everything_is_measured_anew(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)
    run(job, FakeProcesses())
    again = FakeProcesses()
    run(job, again)
    assert {"eager", "int8"} <= set(again.tasks)


def test_the_networks_go_when_all_is_measured_and_stay_for_what_failed(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)

    class Writing(FakeProcesses):
        def __call__(self, store, name, task, say):
            (store.folder / "network.onnx").touch()
            return super().__call__(store, name, task, say)

    run(job, Writing({"streams": FAILED}))
    assert (tmp_path / "network.onnx").exists()
    run(job, Writing(), is_resumed=True)
    assert not (tmp_path / "network.onnx").exists()


def test_the_time_left_is_what_the_rungs_before_took(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM, only=["eager", "batches"])
    steps: list[LadderStep] = []
    now = iter(range(0, 1000, 10))
    store, fakes = Store(job.work), FakeProcesses()
    with store.opened(job.facts, is_resumed=False):
        Runner(job, store, steps.append, fakes, fakes.service, clock=lambda: next(now)).run()
    last = [step for step in steps if step.rung.name == "batches"][-1]
    assert (last.number, last.of, last.doing, last.left_s) == (2, 2, "measuring", 10)


def test_the_service_has_the_cascade_if_that_was_measured(tiny_set, tmp_path):
    images: Path = tmp_path / "images"
    fakes = FakeProcesses()
    results = run(job_of(tiny_set, tmp_path, images=images, cascade_margin=0.7), fakes)
    assert fakes.margins == [0.7]
    assert fakes.tasks["prepare-labelled"].images == images
    assert results["eager"].outcome == "skipped"
    assert "no PyTorch source" in results["eager"].reason
