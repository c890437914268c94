"""A ladder's run: the order of its processes, what they build on, how they and the service end."""

import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from calibration.ladder import ladder as module
from calibration.ladder.ladder import Ladder, run_engine, run_service_rung
from calibration.ladder.rungs import PHOTOS, TRUTH, LadderError, RungOptions, RungResult, Store
from tests.support.calibration.ladders import FakeProcesses, job_of, measured, tiny_job
from tests.support.cases import cases
from tests.support.plans import planned
from tests.support.tiny_networks import write_tiny_set

RANDOM = {"random_weights": True, "size": 64}
FAILED = RungResult(outcome="failed", reason="its process died")
SKIPPED = RungResult(outcome="skipped", reason="no compiler")
SLEEPS = "import time; time.sleep(600)"


def run(job, fakes, *, is_resumed=False):
    return Ladder(job, run=fakes).run(is_resumed=is_resumed)


def served_with(fakes: FakeProcesses) -> str:
    """The plan of the service."""
    (options,) = fakes.tasks["service"]
    return options.plan


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
    assert served_with(fakes) == "full"  # one network has no plan


def test_a_rung_builds_on_the_fastest_of_its_engine(tmp_path):
    fast = RungOptions(batch=16, is_inference_mode=True)
    answers: dict[str, Any] = {"batches": measured(99.0, fast), "channels_last": measured(1.0)}
    fakes = FakeProcesses(answers)
    run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    (scripted,) = fakes.tasks["torchscript"]
    assert scripted == fast.model_copy(update={"mode": "script"})
    assert all(options.is_inference_mode is False for options in fakes.tasks["openvino"])


def test_what_fails_or_is_skipped_does_not_end_the_ladder(tmp_path):
    fakes = FakeProcesses({"compile": SKIPPED, "streams": FAILED, "prepare-export": SKIPPED})
    results = run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    assert (results["compile"], results["streams"]) == (SKIPPED, FAILED)
    assert results["onnxruntime"].reason == "no compiler"  # what it needs could not be made
    assert "onnxruntime" not in fakes.tasks
    assert results["service"].outcome == "measured"


def test_an_error_is_the_rungs_result_but_of_the_network_the_end(tmp_path):
    fakes = FakeProcesses({"latency": LadderError("no memory")})
    results = run(job_of("resnet18", tmp_path, **RANDOM), fakes)
    assert (results["latency"].outcome, results["latency"].reason) == ("failed", "no memory")
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


def test_resume_tries_again_what_failed_and_without_it_everything_is(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)
    run(job, FakeProcesses({"streams": FAILED, "compile": SKIPPED}))
    again = FakeProcesses()
    assert run(job, again, is_resumed=True)["streams"].outcome == "measured"
    assert set(again.tasks) == {"streams"}
    job = job_of("resnet18", tmp_path, **RANDOM)
    run(job, FakeProcesses())
    again = FakeProcesses()
    run(job, again)
    assert {"eager", "int8"} <= set(again.tasks)


def test_the_networks_go_when_all_is_measured_and_stay_for_what_failed(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM)

    class Writing(FakeProcesses):
        def __call__(self, job, *more):
            (job.work / "network.onnx").touch()
            return super().__call__(job, *more)

    run(job, Writing({"streams": FAILED}))
    assert (tmp_path / "network.onnx").exists()
    run(job, Writing(), is_resumed=True)
    assert not (tmp_path / "network.onnx").exists()


def test_the_time_left_is_what_the_rungs_before_took(tmp_path):
    job = job_of("resnet18", tmp_path, **RANDOM, rungs="eager,batches")
    steps, now = list[str](), iter(range(0, 1000, 10))
    Ladder(job, steps.append, FakeProcesses(), lambda: next(now)).run(is_resumed=False)
    assert steps[0].startswith("1 of 2, about 30 s left: ")  # unknown yet: twice 15 s
    assert steps[-1] == "2 of 2, about 10 s left: batches: measuring"


def test_the_service_has_the_fast_plan_if_that_was_measured(tmp_path):
    images: Path = tmp_path / "images"
    folder = planned(
        write_tiny_set(tmp_path / "set" / "tiny"), (("sure",), 0.9), (("unsure",), None)
    )
    fakes = FakeProcesses()
    results = run(job_of(folder, tmp_path / "work", images=images), fakes)
    assert served_with(fakes) == "fast"
    assert "prepare-labelled" in fakes.tasks
    assert results["eager"].outcome == "skipped"
    assert "no PyTorch source" in results["eager"].reason


def in_child(job, code, choices, say):
    """Run ``code`` in a rung's process, which returns ``answer``."""
    names: dict[str, Any] = {"say": say, "work": job.work}
    exec(f"import os, pathlib, subprocess, sys\n{code}", names)
    return names["answer"]


@pytest.fixture
def job(tiny_set: Path, tmp_path: Path):
    with Store(tmp_path).opened({}, is_resumed=False):
        yield tiny_job(tiny_set, tmp_path)


@pytest.fixture
def run_code(job, monkeypatch):
    def run(code, say=lambda _: None):
        monkeypatch.setattr(module, "run_in_child", in_child)
        return run_engine(job, "latency", code, (), say)

    return run


def test_a_rungs_process_says_what_it_does_and_its_result_comes_back(job):
    heard: list[str] = []
    int8 = RungOptions(precision="INT8")
    result = run_engine(job, "latency", "openvino", (int8,), heard.append)
    assert (result.outcome, result.chosen) == ("measured", int8)
    assert heard == ["preparing", "measuring", "measured"]


@cases(
    "code, how",
    ("os.kill(os.getpid(), 9)", "memory ran out, most likely"),
    ("os.kill(os.getpid(), 11)", "SIGSEGV"),
    ("os._exit(3)", "exit code 3"),
    ("raise ValueError('no such module')", "no such module"),
)
def test_one_that_dies_is_a_failed_rung_that_says_how(run_code, code, how):
    result = run_code(code)
    assert result.outcome == "failed"
    assert how in result.reason


def test_one_that_hangs_is_given_up_and_ended(run_code, monkeypatch):
    monkeypatch.setattr(module, "START_LIMIT_S", 0.5)
    result = run_code(SLEEPS)
    assert result.outcome == "skipped"
    assert "not ready to run within 0.5 s" in result.reason
    assert psutil.Process().children() == []


def test_one_that_measures_without_end_has_failed(run_code, monkeypatch):
    monkeypatch.setattr(module, "END_LIMIT_S", 0.0)
    assert run_code(f"say('measuring'); {SLEEPS}") == RungResult(
        outcome="failed", reason="it did not end long after its time: given up"
    )


def test_ctrl_c_ends_it_and_what_it_started(job, run_code):
    code = (
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]);"
        "(work / 'pids').write_text(f'{os.getpid()} {child.pid}');"
        f"say('measuring'); {SLEEPS}"
    )

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_code(code, interrupt)
    ours, its_child = map(int, (job.work / "pids").read_text().split())
    assert not psutil.pid_exists(ours)
    deadline = time.monotonic() + 30  # its child is somebody else's to wait for
    while psutil.pid_exists(its_child) and time.monotonic() < deadline:
        if psutil.Process(its_child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_a_process_that_cannot_be_started_is_a_failed_rung(job, monkeypatch):
    monkeypatch.setattr(sys, "executable", os.devnull)
    result = run_engine(job, "latency", "openvino", (), lambda _: None)
    assert (result.outcome, "could not be started" in result.reason) == ("failed", True)


class Process:
    """A service that is nobody's: it only says that it was stopped."""

    pid = 1
    is_stopped = False

    def interrupt(self, _: float) -> None:
        self.is_stopped = True


def answering(answer):
    return partial(httpx.Client, transport=httpx.MockTransport(answer))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()

    @contextmanager
    def child(*_: object, **__: object):
        yield process

    monkeypatch.setattr(module, "Child", child)
    monkeypatch.setattr(module, "_wait_ready", lambda *_: "")
    monkeypatch.setattr(module, "_loaded", lambda *_: measured(5.0).figures)
    return process


def run_service(folder: Path, work: Path, photos: list[tuple[Path, int]]) -> RungResult:
    job = job_of(folder, work)
    with Store(work).opened(job.facts, is_resumed=False):
        (work / PHOTOS).mkdir()
        for number, (path, _) in enumerate(photos):
            (work / PHOTOS / f"{number}.jpg").symlink_to(path)
        np.save(work / TRUTH, [index for _, index in photos])
        return run_service_rung(job, "full")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"photo")
    return path


def test_top1_is_of_every_photo(tiny_set, tmp_path, photo, process, monkeypatch) -> None:
    body = {"predictions": [{"index": 1}]}
    monkeypatch.setattr(httpx, "Client", answering(lambda _: httpx.Response(200, json=body)))
    figures = run_service(tiny_set, tmp_path / "work", [(photo, 1), (photo, 0)]).figures
    assert figures is not None
    assert (figures.top1, figures.num_labelled) == (0.5, 2)
    assert process.is_stopped


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("", request=request)


@cases(
    "answer, says",
    (gone, "not be measured to the end: ConnectError"),
    (lambda _: httpx.Response(413, text="too large"), "photo.jpg: the service answers too l"),
)
def test_a_service_that_does_not_answer_is_an_error_of_the_rung(
    tiny_set, tmp_path, photo, process, monkeypatch, answer, says
) -> None:
    monkeypatch.setattr(httpx, "Client", answering(answer))
    with pytest.raises(LadderError, match=says):
        run_service(tiny_set, tmp_path / "work", [(photo, 1)])
    assert process.is_stopped


def test_a_photo_that_was_removed_meanwhile_too(tiny_set, tmp_path, photo, process) -> None:
    photo.unlink()
    with pytest.raises(LadderError, match=r"to the end: .*No such file.*photo\.jpg"):
        run_service(tiny_set, tmp_path / "work", [(photo, 1)])
    assert process.is_stopped
