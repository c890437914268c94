"""The process of a rung: ``python -P -m calibration.ladder.worker TASK.json RESULT.json``.

It writes its result in one step, and reports its progress on stdout, a JSON object per line. It
ends when its stdin is closed, since the parent is gone then.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from calibration.ladder.engine import MakeReady, ReadyNetwork, SkippedError, top1
from calibration.ladder.measure import WARM_UP, figures_of, run_calls
from calibration.ladder.prepare import PREPARATIONS
from calibration.ladder.rung import RungOptions, RungResult, RungTask
from models.errors import TandemError
from models.extras import MissingExtraError, needs_extra

OOM_SCORE = Path("/proc/self/oom_score_adj")
TRIAL = 0.15  # of a run's time, for each of several choices
Say = Callable[[str], None]


def engine_of(task: RungTask) -> MakeReady:
    """Return the task's engine; only its own runtime is imported."""
    if task.engine == "torch":
        with needs_extra("ladder", "ladder"):
            from calibration.ladder.torch_engine import TorchNetwork
        return TorchNetwork
    if task.engine == "onnxruntime":
        from calibration.ladder.onnx_engine import OnnxNetwork

        return OnnxNetwork
    if task.engine == "ensemble":
        from calibration.ladder.ensemble_engine import EnsembleNetwork

        return EnsembleNetwork
    from calibration.ladder.openvino_engine import OpenVinoNetwork

    return OpenVinoNetwork


def outcome_of(task: RungTask, say: Say = lambda _: None) -> RungResult:
    """Run the task; an error becomes the result."""
    try:
        if task.engine in PREPARATIONS:
            PREPARATIONS[task.engine](task)
            return RungResult(outcome="prepared")
        return measured(task, engine_of(task), say)
    except (SkippedError, MissingExtraError) as error:
        return RungResult(outcome="skipped", reason=error.message)
    except TandemError as error:
        return RungResult(outcome="failed", reason=error.message)
    except Exception as error:  # of any runtime: the ladder continues without this rung
        lines = str(error).strip().splitlines() or [""]
        return RungResult(outcome="failed", reason=f"{type(error).__name__}: {lines[0]}")


def measured(task: RungTask, make_ready: MakeReady, say: Say) -> RungResult:
    """Prepare the network with the best of the task's choices, and measure it."""
    started = time.monotonic()
    say("preparing")
    chosen, ready = best_choice(task, make_ready)
    _warm_up(ready, task)
    prepared_s = time.monotonic() - started
    say("measuring")
    run = run_calls(ready.calls, task.seconds, task.cores)
    say("measured")
    figures = figures_of(run, chosen.batch, task.cores)
    if not task.network.is_random:
        is_ensemble = task.engine == "ensemble"
        share, num_labelled = top1(ready, task.work, chosen.batch, is_ensemble=is_ensemble)
        figures = figures.model_copy(update={"top1": share, "num_labelled": num_labelled})
    return RungResult(
        outcome="measured",
        chosen=chosen,
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=ready.notes,
    )


def best_choice(task: RungTask, make_ready: MakeReady) -> tuple[RungOptions, ReadyNetwork]:
    """Return the choice with the highest throughput in a short run.

    Choices that this machine cannot run are skipped.

    Raises:
        SkippedError: the machine can run none of them.

    """
    tried: list[tuple[float, RungOptions, ReadyNetwork]] = []
    reasons: list[str] = []
    for options in task.choices:
        try:
            ready = make_ready(task, options)
        except SkippedError as error:
            reasons.append(error.message)
            continue
        if len(task.choices) == 1:
            return options, ready
        _warm_up(ready, task)
        run = run_calls(ready.calls, TRIAL * task.seconds, task.cores)
        tried.append((options.batch * len(run.latencies_s) / run.seconds, options, ready))
        tried = sorted(tried, key=lambda trial: -trial[0])[:1]  # frees the memory of the others
    if not tried:
        raise SkippedError("; ".join(dict.fromkeys(reasons)))
    return tried[0][1:]


def _warm_up(ready: ReadyNetwork, task: RungTask) -> None:
    """Run for a while without counting: the first calls allocate, and may compile."""
    for call in ready.calls:
        call()
    run_calls(ready.calls, WARM_UP * TRIAL * task.seconds, task.cores)


def main(task_file: Path, result_file: Path) -> None:
    """Read the task, do it, write the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process
    events = _own_stdout()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(OSError):  # then this process is killed first if memory runs out
        OOM_SCORE.write_text("500", "ascii")
    warnings.simplefilter("ignore")  # torch deprecates features that OpenVINO and the rungs use
    logging.disable(logging.ERROR)
    task = RungTask.model_validate_json(task_file.read_bytes())
    result = outcome_of(task, lambda what: _tell(events, what))
    partial = result_file.with_name(f".{result_file.name}.partial")
    partial.write_text(result.model_dump_json(), "utf-8")
    partial.replace(result_file)
    os._exit(0)  # without waiting for the runtimes' threads


def _own_stdout() -> int:
    """Keep stdout for events; redirect the output of libraries to stderr."""
    own = os.dup(1)
    os.dup2(2, 1)
    return own


def _tell(events: int, what: str) -> None:
    os.write(events, json.dumps({"event": what}).encode() + b"\n")


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
